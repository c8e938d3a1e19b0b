"""What several threads must not do at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from .errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

TRACING = threading.RLock()
"""Held by whoever traces or compiles, or calls what torch.compile made. Torch keeps what it is
tracing in variables of the whole process, and refuses to run compiled code meanwhile."""


def traces(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the function holds `TRACING`."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with TRACING:
            return function(*args, **kwargs)

    return alone


class Turn:
    """Whose turn it is to use an executable, whose caches and buffers are one generation's.

    Other threads wait for theirs. Errors: `InputError` for a thread that has it already, such as
    in a streamer that generates with the model that it is streaming: it would wait for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        here = threading.get_ident()
        if self._holder == here:
            raise InputError(
                "generate was called on a model that is generating in this very thread, from a "
                "streamer or a stopping criterion: its caches hold that text. Call it when the "
                "generation is over, or load the model a second time for such calls"
            )
        self._lock.acquire()
        self._holder = here

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._holder = None
        self._lock.release()
