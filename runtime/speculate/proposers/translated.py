"""Draft models with tokens of their own.

Sources: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (2025): token-level intersection (TLI) and string-level exact match
(SLEM), which transformers calls universal assisted decoding.

By tokens, the model predicts among those that the target has, too: every tree, length and verifier
takes what it says as it takes any draft model's. By text, it drafts as it would write, and that is
encoded in the target's tokens, with the last words of the text before it. Where no token ends as
the text does, the target cannot say those tokens: then what was drafted is encoded alone. A draft's
last token might still become part of a longer one; it is taken when the model has drafted as much
as it may.
"""

from __future__ import annotations

import codecs

import numpy as np

from ....ir.plan import RespelledDraft, SharedTokensDraft
from ....ir.plan.translated import TranslatedDraft
from ..committed import CommittedRows
from ..level import Ids, Level
from ..translated import Translated, TranslatedRows, Vocabularies
from .base import PROPOSERS
from .cached import CachedProposer

LOOK_BEHIND = 10
"""The target's tokens before a draft that are encoded with it, as in transformers."""


class TranslatedProposer(CachedProposer):
    """Base. words: both vocabularies. committed: the texts in the model's own tokens."""

    record: TranslatedDraft
    committed: TranslatedRows
    words: Vocabularies

    def _rows(self, limit: int) -> CommittedRows:
        self.words = Vocabularies.of(self.executable, self.function, self.record.shared)
        return TranslatedRows(self.executable, self.function, self.words, limit=limit)


@PROPOSERS.register(SharedTokensDraft)
class SharedTokensProposer(TranslatedProposer):
    """Predicts the target's tokens, and is fed its own."""

    record: SharedTokensDraft

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        own = np.where(tokens < 0, -1, self.words.known[tokens])
        level = super().grow(own, parents, count)
        level.tokens[own < 0] = -1  # nothing follows a token that the model lacks
        return level


class _Chain:
    """One text's draft. own: what the model drafted. tokens: what that is in the target's. taken:
    of these, those that are drafted. open: whether the model may draft more."""

    def __init__(self, text: Translated) -> None:
        self.words = text.words
        self.own, self.tokens, self.taken = list[int](), list[int](), list[int]()
        self.open = text.ready and not text.rest
        said = text.said[-LOOK_BEHIND:]
        while said and not _whole(b"".join(map(self.words.ours.bytes_of, said))):
            said = said[1:]
        self.before = b"".join(map(self.words.ours.bytes_of, said))

    def add(self, token: int) -> None:
        """The model's next token."""
        if self.words.theirs.special(token):
            self.open = False
            return
        self.own.append(token)
        written = b"".join(map(self.words.theirs.bytes_of, self.own))
        self.tokens = self._spelled(
            codecs.getincrementaldecoder("utf-8")("replace").decode(written)
        )

    def _spelled(self, text: str) -> list[int]:
        ours, left, place = self.words.ours, len(self.before), 0
        ids, _ = ours.encode(self.before.decode() + text)
        while left > 0 and place < len(ids):
            left -= len(ours.bytes_of(ids[place]))
            place += 1
        return ids[place:] if left == 0 else ours.encode(text)[0]

    def take(self, done: bool) -> int:
        """The next token of the draft; -1 where there is none."""
        place = len(self.taken)
        settled = len(self.tokens) - (0 if done or not self.open else 1)
        if place >= settled or self.tokens[:place] != self.taken:
            return -1
        self.taken.append(self.tokens[place])
        return self.taken[-1]


def _whole(written: bytes) -> bool:
    try:
        written.decode()
    except UnicodeDecodeError:
        return False
    return True


@PROPOSERS.register(RespelledDraft)
class RespelledProposer(TranslatedProposer):
    """Drafts with the model's best tokens, and says what they write. made: tokens of each draft."""

    record: RespelledDraft

    def root(self, count: int) -> Level:
        outputs = self.committed.catch_up()
        self.nodes = self.no_nodes(0)
        self.chains = [_Chain(text) for text in self.committed.written]
        for chain, lacking in zip(self.chains, self.committed.lacking.tolist(), strict=True):
            chain.open = chain.open and not lacking
        self.drafted = 0
        self._add(outputs["draft_tokens"].cpu().numpy())
        return self._next()

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """The next token of each chain; `tokens` are the chains' own last ones."""
        return self._next()

    def _add(self, best: Ids) -> None:
        """The model's best tokens i64[B,1,1] are its next ones."""
        self.drafted += 1
        for chain, token in zip(self.chains, best[:, 0, 0].tolist(), strict=True):
            if chain.open:
                chain.add(token)

    def _next(self) -> Level:
        while self.drafted < self.record.levels and any(
            chain.open and len(chain.tokens) - 1 <= len(chain.taken) for chain in self.chains
        ):
            last = [[chain.own[-1] if chain.open else 0] for chain in self.chains]
            fed = self.fed(np.array(last), np.zeros((len(last), 1), dtype=np.int64), None)
            self._add(fed["draft_tokens"].cpu().numpy())
        done = self.drafted == self.record.levels
        taken = np.array([[[chain.take(done)]] for chain in self.chains])
        return Level(taken, np.zeros(taken.shape, dtype=np.float32))
