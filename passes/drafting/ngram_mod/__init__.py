"""Draft from one table of fixed size: the token that last followed each n-gram of any text.

Source: llama.cpp, common/ngram-mod (2026).

An n-gram's place in the table is its hash modulo the size; what is there is the token that followed
it last, or that followed another n-gram of that place. A draft is a walk: each token drafted makes
the next n-gram. It ends where nothing is known, and is not worth verifying below `least` tokens.
All texts share the table. It is emptied where three drafts in a row were right in less than half of
their tokens, and where a quarter of it is full when a text begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from ....ir import InputError
from ....ir.plan import DraftRecord, policy
from ....ir.plan.bounds import Levels, Nodes
from ....runtime.memo import Lore, Memo
from ....runtime.speculate.drafters.base import DRAFTERS, ChainDrafter, lore_of
from ....runtime.speculate.setting import Setting
from ..ngram_map import agreeing


@policy
@dataclass(frozen=True)
class NgramModDraft(DraftRecord):
    """The token that last followed the text's last `match` tokens in any text, over and over.

    match: tokens that must match. least, tokens: of a draft. size: places of the table, of four
    bytes each.
    """

    match: Levels = 24
    least: Nodes = 48
    tokens: Nodes = 64
    size: Annotated[int, Field(ge=1, le=2**28)] = 4 * 2**20
    kind: ClassVar[str] = "ngram_mod"

    def check(self) -> None:
        if self.least > self.tokens:
            raise InputError(f"ngram_mod: least={self.least} is more than tokens={self.tokens}")


EMPTY = -1
MULTIPLIER, WORD = 6364136223846793005, 2**64 - 1
"""Of the hash, h(t1 ... tn) = sum of ti * MULTIPLIER^(n - i), modulo 2^64."""

FULL = 0.25
"""Share of the table that may be in use when a text begins."""

CHUNK = 32
"""Tokens by which a text grows before its n-grams go into the table."""

FAILED, HALF = 3, 0.5
"""Drafts in a row that were right in less than half of their tokens, after which all is forgotten.
"""


class Table(Lore):
    """The table. used: places that hold something."""

    def __init__(self, record: NgramModDraft) -> None:
        self.match, self.size = record.match, record.size
        self.top = pow(MULTIPLIER, record.match - 1, WORD + 1)
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.next = np.full(self.size, EMPTY, dtype=np.int32)
        self.used = 0

    def hash(self, gram: Sequence[int]) -> int:
        """The hash of an n-gram."""
        value = 0
        for token in gram:
            value = (value * MULTIPLIER + token) & WORD
        return value

    def rolled(self, value: int, first: int, last: int) -> int:
        """The hash of the n-gram that has lost its first token and gained a last one."""
        return ((value - first * self.top) * MULTIPLIER + last) & WORD

    def read(self, text: Sequence[int], start: int) -> int:
        """Learn what followed the n-grams that begin at `start` or later; where the first one
        begins that nothing follows yet."""
        end = len(text) - self.match
        if start >= end:
            return start
        value = self.hash(text[start : start + self.match])
        for begin in range(start, end):
            token = text[begin + self.match]
            place = value % self.size
            self.used += int(self.next[place]) == EMPTY
            self.next[place] = token
            value = self.rolled(value, text[begin], token)
        return end

    def walk(self, gram: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens after an n-gram."""
        run, value = list(gram), self.hash(gram)
        while len(run) < self.match + count:
            token = int(self.next[value % self.size])
            if token == EMPTY:
                break
            value = self.rolled(value, run[len(run) - self.match], token)
            run.append(token)
        return run[self.match :]

    def tensors(self) -> Memo:
        """places: i64[N], in use. tokens: i32[N], there. shape: i64[2], of n-grams and table."""
        places = np.flatnonzero(self.next != EMPTY)
        return {
            "places": torch.from_numpy(places.astype(np.int64)),
            "tokens": torch.from_numpy(self.next[places]),
            "shape": torch.tensor([self.match, self.size]),
        }

    def take(self, memo: Memo, vocabulary: int) -> None:
        if memo.keys() != {"places", "tokens", "shape"}:
            raise InputError(f"expected places, tokens and shape, got {', '.join(sorted(memo))}")
        places, tokens, shape = memo["places"], memo["tokens"], memo["shape"]
        types = [t.dtype for t in (places, tokens, shape)]
        one = (places.dim(), tokens.dim(), shape.dim()) == (1, 1, 1)
        if types != [torch.int64, torch.int32, torch.int64] or not one:
            raise InputError("expected places i64[N], tokens i32[N] and shape i64[2]")
        if shape.tolist() != [self.match, self.size] or len(places) != len(tokens):
            raise InputError(
                f"expected n-grams of match={self.match} tokens in a table of size={self.size}, "
                f"got {shape.tolist()}"
            )
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= self.size):
            raise InputError(f"places outside the table of {self.size}")
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary):
            raise InputError(f"token ids outside 0..{vocabulary - 1}")
        self.clear()
        self.next[places.numpy()] = tokens.numpy()
        self.used = int((self.next != EMPTY).sum())


class _Text:
    """A sequence. read: where the first n-gram begins that is not in the table. drafted: the last
    draft. failed: drafts in a row that were mostly wrong."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.read, self.failed = 0, 0
        self.drafted: list[int] = []


@DRAFTERS.register(NgramModDraft)
class NgramModDrafter(ChainDrafter):
    """Walks through the table. See the module docstring."""

    record: NgramModDraft
    lore = Table

    def __init__(self, record: NgramModDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.table: Table = lore_of(self.executable, NgramModDrafter, record)
        self.levels = record.tokens

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.texts = [_Text(text) for text in self.readable(prompts)]
        for text in self.texts:
            text.read = self.table.read(text.tokens, 0)
        if self.table.used > FULL * self.table.size:
            self.table.clear()

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        text = self.texts[index]
        if text.drafted:
            self._judge(text, agreeing(text.drafted, new))
        text.tokens += new
        text.drafted = []
        if text.read + self.table.match + CHUNK <= len(text.tokens):
            text.read = self.table.read(text.tokens, text.read)

    def _judge(self, text: _Text, right: int) -> None:
        text.failed = text.failed + 1 if right < HALF * len(text.drafted) else 0
        if text.failed == FAILED:
            self.table.clear()
            text.failed = text.read = 0

    def chain(self, index: int, room: int) -> list[int]:
        text, match = self.texts[index], self.table.match
        if room < 1 or len(text.tokens) < match:
            return []
        walked = self.table.walk(text.tokens[-match:], min(room, self.levels))
        text.drafted = walked if len(walked) >= min(self.record.least, room) else []
        return text.drafted
