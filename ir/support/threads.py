"""Locks between threads, and waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from .errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

TRACING = threading.RLock()
"""Held while tracing, compiling, or calling compiled code: torch keeps the state of tracing in
global variables and refuses to run compiled code meanwhile."""


def traces(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: hold `TRACING` during calls."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with TRACING:
            return function(*args, **kwargs)

    return alone


PAUSE, PAUSES = 0.02, 15
"""Seconds between two looks at a process' threads, and looks at most unless told."""


def settle(pauses: int = PAUSES) -> bool:
    """Wait until this process's threads have stopped looking for work (30 ms, mostly); whether they
    did. Threads of what was measured before would take the cores from what is measured next."""
    for _ in range(pauses):
        used = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - used < PAUSE / 10:
            return True
    return False


class Turn(type(threading.RLock())):  # type: ignore[misc]
    """Lock of an executable, whose caches belong to one generation at a time.

    Release is the C implementation's, which no signal interrupts. Errors: `InputError` for a thread
    that holds the lock already, for instance a streamer that generates with its own model.
    """

    def __init__(self) -> None:
        self._own = threading.Condition(self)

    def __enter__(self) -> None:
        if self._is_mine():
            raise InputError(
                "generate was called on a model that is generating in this very thread, from a "
                "streamer or a stopping criterion: its caches hold that text. Call it when the "
                "generation is over, or load the model a second time for such calls"
            )
        try:
            self.acquire()
        except BaseException:  # Ctrl-C, possibly after acquiring
            if self._is_mine():
                self.release()
            raise

    def _is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            self._own.notify(0)
        except RuntimeError:
            return False
        return True
