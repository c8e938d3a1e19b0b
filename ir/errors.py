"""The one error family of the project.

Messages say what was expected, what came, where, and what to do.
"""

from __future__ import annotations


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


class GraftworkWarning(UserWarning):
    """Something that is legal, and yet most likely not what the user wants; says what to do."""
