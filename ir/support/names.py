"""Valid names of functions, states, inputs, outputs and programs.

Names come from untrusted files and appear in messages, generated code and file names. They are
words of ASCII letters, digits and ``_``, joined by dots (``step``, ``eagle.kv.2.key``,
``hidden.normed``), of at most 200 characters, do not begin with a digit, and contain no Python
keyword. Program names may contain dashes. Weights keep their names in the checkpoint, which are not
used in code or file names.
"""

from __future__ import annotations

import keyword
import re

from .errors import InputError

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)
_PROGRAM = re.compile(r"\w+(?:[.-]\w+)*", re.ASCII)
_MOST = 200


def is_name(name: object) -> bool:
    """Whether a name is valid. See the module docstring.

    >>> [is_name(name) for name in ("eagle.kv.2.key", "../x", "None", "a.", "kv.in")]
    [True, False, False, False, False]
    """
    if not isinstance(name, str) or len(name) > _MOST or not _NAME.fullmatch(name):
        return False
    return not any(map(keyword.iskeyword, name.split(".")))


def check_name(what: str, name: object) -> None:
    """Errors: `InputError` for an invalid name. what: the named thing, such as "a function"."""
    if not is_name(name):
        raise InputError(
            f"{what} cannot be called {shown(name)}: expected words of letters, digits and _ "
            f"joined by dots, none of them a word of Python, such as step or kv.0.key"
        )


def check_program_name(name: object) -> None:
    """Errors: `InputError` for an invalid name of a program."""
    if not isinstance(name, str) or len(name) > _MOST or not _PROGRAM.fullmatch(name):
        raise InputError(
            f"a program cannot be called {shown(name)}: expected words of letters, digits and _ "
            f"joined by dots or dashes, such as llama"
        )


def shown(name: object) -> str:
    """A name for a message: quoted, in ASCII, shortened."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:80]}..."
