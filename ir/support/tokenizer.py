"""Tokenizers: loading, encoding and decoding.

Errors of the `tokenizers` library, including its panics, which are not `Exception`, become
`InputError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import GraftworkError, InputError
from .files import LARGE, read_bytes
from .memory import give_back
from .names import shown

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

GARBAGE = 8 << 20
"""Bytes of a tokenizer.json from which on it is worth giving back what reading it leaves: six times
as many, which would stay resident beside the weights."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json. Truncation and padding stored in the file are turned off, as in
    transformers. Errors: `InputError`."""
    from tokenizers import Tokenizer

    with refusing(f"cannot read {path}", "; expected the tokenizer that belongs to the model"):
        data = read_bytes(path, LARGE)
        read = Tokenizer.from_buffer(data)
        read.no_truncation()
        read.no_padding()
    if len(data) >= GARBAGE:
        del data
        give_back()
    return read


def encode(tokenizer: Tokenizer, text: str, *, marked: bool = True) -> list[int]:
    """Text as token ids. marked: add special tokens, such as the one that begins a text. Errors:
    `InputError` for text with lone surrogates, or that cannot be encoded."""
    ids: list[int] = encoded(tokenizer, text, marked=marked).ids
    return ids


def encoded(tokenizer: Tokenizer, text: str, *, marked: bool = True) -> Encoding:
    """As `encode`, with tokens, offsets and more. Errors: likewise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"expected text, got half a character at place {error.start} of {shown(text)}: it was "
            f"read from something that is not UTF-8, or cut within a character"
        ) from error
    with refusing(f"the tokenizer cannot encode {shown(text)}"):
        return tokenizer.encode(text, add_special_tokens=marked)


def check_length(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Before a text is encoded, which takes minutes and gigabytes for hundreds of megabytes.

    Errors: `InputError` if it has more than `most` tokens, however long these are."""
    if len(text) <= 64 * most:  # vocabularies have longer tokens, but few: that is for `encode`
        return
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if len(text) > longest * most:
        raise InputError(
            f"the prompt has {len(text)} characters, which are {len(text) // longest} tokens at "
            f"least, and the model's context is {most}: shorten the prompt"
        )


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Token ids as text, without special tokens. Errors: `InputError`."""
    with refusing(f"the tokenizer cannot decode {len(ids)} tokens"):
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    return text


_PLAIN = (Exception, ValueError, OSError)
"""Errors whose class name is omitted from messages."""


@contextmanager
def refusing(
    before: str, after: str = "", *, kind: type[GraftworkError] = InputError
) -> Iterator[None]:
    """Turn exceptions of a library in the block, panics included, into an error of `kind` with the
    message ``before: message after``."""
    try:
        yield
    except GraftworkError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # an interrupt, or the end of the process
        named = "" if type(error) in _PLAIN else f"{type(error).__name__}: "
        message = named + " ".join(str(error).split())[:300]
        raise kind(f"{before}: {message}{after}") from error
