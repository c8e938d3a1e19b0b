"""A server on loopback, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from graftwork.serving.app import app_of
from graftwork.serving.run import listen
from graftwork.serving.service import Service


@contextmanager
def served(service: Service, **options: Any) -> Iterator[int]:
    """Its port. options: of `app_of`. The service's engine is closed at the end."""
    listening = listen("127.0.0.1", 0, None)
    config = uvicorn.Config(app_of(service, **options), log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()
