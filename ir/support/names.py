"""What functions, states, inputs, outputs and programs may be called.

Names come from files of others and become parts of messages, of generated code and of file names.
So they are words of ASCII letters, digits and ``_``, joined by dots (``step``, ``eagle.kv.2.key``,
``hidden.normed``), which begin with no digit and are no words of Python (``None``, ``in``), of at
most 200 characters. A program is named after a kind of model, and may have dashes too. Weights are
called what the checkpoint calls them, and nothing is ever made of their names.
"""

from __future__ import annotations

import keyword
import re

from .errors import InputError

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*", re.ASCII)
_PROGRAM = re.compile(r"\w+(?:[.-]\w+)*", re.ASCII)
_MOST = 200


def is_name(name: object) -> bool:
    """Whether something can be called so. See the module docstring.

    >>> [is_name(name) for name in ("eagle.kv.2.key", "../x", "None", "a.", "kv.in")]
    [True, False, False, False, False]
    """
    if not isinstance(name, str) or len(name) > _MOST or not _NAME.fullmatch(name):
        return False
    return not any(map(keyword.iskeyword, name.split(".")))


def check_name(what: str, name: object) -> None:
    """Errors: `InputError` for what cannot be a name. what: of, such as "a function"."""
    if not is_name(name):
        raise InputError(
            f"{what} cannot be called {shown(name)}: expected words of letters, digits and _ "
            f"joined by dots, none of them a word of Python, such as step or kv.0.key"
        )


def check_program_name(name: object) -> None:
    """Errors: `InputError` for what cannot be a program's name."""
    if not isinstance(name, str) or len(name) > _MOST or not _PROGRAM.fullmatch(name):
        raise InputError(
            f"a program cannot be called {shown(name)}: expected words of letters, digits and _ "
            f"joined by dots or dashes, such as llama"
        )


def shown(name: object) -> str:
    """A name for a message: quoted, in ASCII, and not without end."""
    text = ascii(name)
    return text if len(text) <= 80 else f"{text[:80]}..."
