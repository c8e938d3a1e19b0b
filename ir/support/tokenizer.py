"""A model's tokenizer.json, and text as its tokens.

What the `tokenizers` library cannot read or encode it answers with exceptions of any kind, a panic
of its own among them, which is no `Exception`. Here they are all `InputError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import GraftworkError, InputError
from .files import LARGE, read_bytes
from .names import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json, neither cutting nor padding what it encodes.

    The file remembers how batches were cut and padded when it was saved. That is no part of the
    vocabulary: transformers turns both off in every call that does not ask for them. Errors:
    `InputError` if it is no such file.
    """
    from tokenizers import Tokenizer

    with refusing(f"cannot read {path}", "; expected the tokenizer that belongs to the model"):
        read = Tokenizer.from_buffer(read_bytes(path, LARGE))
        read.no_truncation()
        read.no_padding()
    return read


def encode(tokenizer: Tokenizer, text: str, *, marked: bool = True) -> list[int]:
    """Text as token ids. marked: whether with what the tokenizer puts around a text, as the token
    that begins one. Errors: `InputError` for text that is not Unicode, or cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"expected text, got half a character at place {error.start} of {shown(text)}: it was "
            f"read from something that is not UTF-8, or cut within a character"
        ) from error
    with refusing(f"the tokenizer cannot encode {shown(text)}"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=marked).ids
    return ids


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Token ids as text, without special tokens. Errors: `InputError` if they cannot be decoded."""
    with refusing(f"the tokenizer cannot decode {len(ids)} tokens"):
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


_PLAIN = (Exception, ValueError, OSError)
"""Errors whose type says nothing beside their message."""


@contextmanager
def refusing(
    before: str, after: str = "", *, kind: type[GraftworkError] = InputError
) -> Iterator[None]:
    """What a library raises within, panics included, becomes an error of graftwork's, an
    `InputError` unless said, that says it between these."""
    try:
        yield
    except GraftworkError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the process
        named = "" if type(error) in _PLAIN else f"{type(error).__name__}: "
        said = named + " ".join(str(error).split())[:300]
        raise kind(f"{before}: {said}{after}") from error
