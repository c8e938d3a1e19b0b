"""The one error family of the project.

Messages say what was expected, what came, where, and what to do.
"""

from __future__ import annotations

from typing import ClassVar


class GraftworkError(Exception):
    """Base class of every error graftwork raises on purpose."""


class VerifyError(GraftworkError):
    """A program breaks a rule of the IR; quotes the printed line with its neighbours."""


class InputError(GraftworkError):
    """Bad user input: an option, a file, a token id, a shape."""


class ParseError(InputError):
    """A program text that cannot be read; names line and column and what was expected."""


class PassError(GraftworkError):
    """A pass refused its input, matched nothing, or produced an invalid program."""


class UnsupportedError(GraftworkError):
    """A model, op or request that graftwork does not support (yet); names it."""


class ExecutionError(GraftworkError):
    """A valid program that cannot be run: it asks for too much, or for rows that do not exist."""


def execution_error(function: str, error: Exception) -> ExecutionError:
    """What a backend says of a function, as ours."""
    said = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return ExecutionError(
        f"running {function} failed: {said}. The program asks for something that this machine or "
        f"backend cannot do; if a model of yours did this, optimize it again, or try another target"
    )


class GraftworkWarning(UserWarning):
    """Something that is legal, and yet most likely not what the user wants; says what to do.

    count: of those that were made, shown or not.
    """

    count: ClassVar[int] = 0

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        GraftworkWarning.count += 1
