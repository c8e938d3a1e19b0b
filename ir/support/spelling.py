"""What the tokens of a tokenizer write, in bytes, whatever they look like in its file.

Byte-level vocabularies write a character for each byte ("Ġ" for a space); those of SentencePiece
write spaces as "▁" and single bytes as "<0xE4>". In bytes, tokens of both can be compared.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError
from .files import LARGE, read_bytes
from .tokenizer import encoded, read_tokenizer, refusing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"
"""How SentencePiece writes a space."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """The bytes of a tokenizer's tokens. added: tokens beside its model's, by id; special ones
    among them write nothing. by_bytes: whether it is byte-level."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = repr(tokenizer.decoder)
        self.by_bytes = "ByteLevel" in self.decoder
        self.added = tokenizer.get_added_tokens_decoder()

    def bytes_of(self, id: int) -> bytes:
        """The bytes that a token writes; of a special one, those of its name."""
        return self._written(id, self.tokenizer.id_to_token(id) or "")

    def _written(self, id: int, piece: str) -> bytes:
        if id in self.added:
            content: str = self.added[id].content
            plain = content if self.by_bytes or self.added[id].special else _spaced(content)
            return plain.encode()
        if self.by_bytes and all(char in _bytes() for char in piece):
            return bytes(_bytes()[char] for char in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        return _spaced(piece).encode()

    def special(self, id: int) -> bool:
        """Whether a token stands for something else than a piece of text."""
        return id in self.added and bool(self.added[id].special)


class Spelling(Pieces):
    """A tokenizer.json whose tokens write texts exactly: encoded, a text's tokens write it.

    begins: tokens before every text. prefix: what the file puts before texts; `encode` does not.
    Errors: `InputError` for a file that cannot be read, or whose tokens are neither byte-level nor
    SentencePiece's.
    """

    def __init__(self, path: Path) -> None:
        whole = read_tokenizer(path)
        self.begins: list[int] = encoded(whole, "").ids
        self.prefix = " " if _prefixes(whole) else ""
        super().__init__(_without_prefix(path) if self.prefix else whole)
        if not (self.by_bytes or SPACE in self.decoder or "Metaspace" in self.decoder):
            raise InputError(
                f"{path}: expected tokens that are byte-level or SentencePiece's, got a tokenizer "
                f"with the decoder {self.decoder[:80]}"
            )
        # Names of special tokens in texts are text; and offsets are of whole tokens, spaces, too.
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.post_processor = None

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """A text's tokens, and the character at which each begins."""
        made = encoded(self.tokenizer, text, marked=False)
        return made.ids, [start for start, _ in made.offsets]

    def table(self, size: int) -> dict[bytes, int]:
        """Tokens below `size` by what they write, special ones by their names behind a zero byte.
        Of several that write the same it is the first that is no single byte's, if there is one."""
        known = [(id, piece) for piece, id in self.tokenizer.get_vocab().items() if id < size]
        # Single bytes last: what else writes the same has its place then.
        known.sort(key=lambda one: (_BYTE.fullmatch(one[1]) is not None, one[0]))
        found: dict[bytes, int] = {}
        for id, piece in known:
            found.setdefault(b"\0" * self.special(id) + self._written(id, piece), id)
        found.pop(b"", None)
        return found


def shared_tokens(
    ours: Spelling, theirs: Spelling, sizes: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Ids of the tokens that write the same in two vocabularies, rising in the first. sizes: of the
    models' logits."""
    first, second = ours.table(sizes[0]), theirs.table(sizes[1])
    pairs = sorted((id, second[written]) for written, id in first.items() if written in second)
    return [id for id, _ in pairs], [id for _, id in pairs]


def _spaced(piece: str) -> str:
    return piece.replace(SPACE, " ")


def _prefixes(tokenizer: Tokenizer) -> bool:
    """Whether it puts a space before texts."""
    before = f"{tokenizer.normalizer!r} {tokenizer.pre_tokenizer!r}"
    metaspace = re.search(r'Metaspace\([^)]*prepend_scheme=("?)(always|first)', before)
    return "Prepend(" in before or "add_prefix_space=True" in before or metaspace is not None


def _without_prefix(path: Path) -> Tokenizer:
    """The tokenizer of a file, putting nothing before texts."""
    from tokenizers import Tokenizer

    data = json.loads(read_bytes(path, LARGE))
    data |= {"truncation": None, "padding": None}
    for role, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = data.get(role) or {}
        steps = [one for one in step.get(inner, [step]) if one.get("type") not in (None, "Prepend")]
        for one in steps:
            if "add_prefix_space" in one:
                one["add_prefix_space"] = False
            if one["type"] == "Metaspace":
                one["prepend_scheme"] = "never"
        data[role] = {"type": "Sequence", inner: steps} if steps else None
    with refusing(f"cannot read {path}"):
        return Tokenizer.from_str(json.dumps(data))


@lru_cache(maxsize=1)
def _bytes() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable ones for themselves,
    the others from U+0100 on (Radford et al. 2019, GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + n): b for n, b in enumerate(others)}
