"""What several threads must not do at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
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


class Turn(type(threading.RLock())):  # type: ignore[misc]
    """Whose turn it is to use an executable, whose caches and buffers are one generation's.

    Other threads wait for theirs. Leaving it is the lock's own, which is compiled code: no signal
    comes in between, so an interrupted generation never keeps it. Errors: `InputError` for a thread
    that has it already, such as in a streamer that generates with the model that it is streaming:
    it would wait for itself.
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
        except BaseException:  # Ctrl-C, perhaps when it was acquired
            if self._is_mine():
                self.release()
            raise

    def _is_mine(self) -> bool:
        """Whether this thread has it."""
        try:
            self._own.notify(0)
        except RuntimeError:
            return False
        return True
