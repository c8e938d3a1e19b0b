"""Errors and warnings. Messages name what was expected, what was given, where, and a remedy."""

from __future__ import annotations

from typing import ClassVar


class GraftworkError(Exception):
    """Base class of graftwork's errors."""


class VerifyError(GraftworkError):
    """A program breaks a rule of the IR; quotes the printed line with its neighbours."""


class InputError(GraftworkError):
    """Bad user input: an option, a file, a token id, a shape."""


class ParseError(InputError):
    """An invalid program text; names line, column and what was expected."""


class PassError(GraftworkError):
    """A pass refused its input, matched nothing, or produced an invalid program."""


class UnsupportedError(GraftworkError):
    """A model, op or request that is not supported."""


class ExecutionError(GraftworkError):
    """A valid program that cannot be run: too large, or with indices out of range."""


def execution_error(function: str, error: Exception) -> ExecutionError:
    """A backend's error as an `ExecutionError`."""
    reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return ExecutionError(
        f"running {function} failed: {reason}. The program asks for something that this machine or "
        f"backend cannot do; if a model of yours did this, optimize it again, or try another target"
    )


class GraftworkWarning(UserWarning):
    """Something valid but probably unintended; names a remedy. count: warnings created so far."""

    count: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        GraftworkWarning.count += 1
