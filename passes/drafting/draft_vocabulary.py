"""A draft's own vocabulary: fewer tokens than the target's, so that its head costs less.

What it builds, as IR (D of V tokens)::

    %i: i64[B,S,K] = %places + embedding(@d2t, %places)     # ids of the target's vocabulary
    %l: f32[B,S,V] = index_select(%logits, -1, @places)     # a column for every target token
    %l: f32[B,S,V] = masked_fill(%l, @absent, -30000)       # which are improbable where it has none

So everything outside the function, samplers and verifiers included, sees the target's vocabulary:
a token that the draft does not know has probability zero in it, and is never proposed (Li et al.,
"EAGLE-3", 2025).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx

from ...ir import (
    TensorType,
    Weight,
    derivation,
    derive,
)
from .grafts import Graft

A = torch.ops.aten

ABSENT = -30000.0
"""The logit of a token that a draft does not know: finite, and exp of it is 0 in every dtype."""


@dataclass(frozen=True)
class DraftVocabulary:
    """D tokens of a target's V. name: prefix of its weights; ids: i64[D], rising."""

    name: str
    vocab: int
    ids: torch.Tensor

    @property
    def rows(self) -> Weight:
        """i64[D], the ids."""
        return Weight.of(f"{self.name}.ids", self.ids)

    def candidates(
        self, graft: Graft, logits: torch.fx.Node, count: int
    ) -> dict[str, torch.fx.Node]:
        """`Graft.candidates` of logits [B,S,D], in the target's vocabulary."""
        found = graft.candidates(logits, count)
        size = len(self.ids)
        offsets = Weight.of(f"{self.name}.d2t", self.ids - torch.arange(size))
        name, vocab, rows = self.name, self.vocab, self.rows
        table = graft.call(A.unsqueeze.default, graft.constant(offsets), -1)
        offset = graft.call(A.embedding.default, table, found["draft_tokens"])
        offset = graft.call(A.squeeze.dim, offset, -1)
        tokens = graft.call(A.add.Tensor, found["draft_tokens"], offset)
        type = TensorType(torch.int64, (vocab,))
        columns = derive(f"{name}.places", type, draft_places, rows, vocab=vocab)
        type = TensorType(torch.bool, (vocab,))
        missing = derive(f"{name}.absent", type, draft_absent, rows, vocab=vocab)
        spread = graft.call(A.index_select.default, logits, -1, graft.constant(columns))
        whole = graft.call(A.masked_fill.Scalar, spread, graft.constant(missing), ABSENT)
        return {**found, "draft_logits": whole, "draft_tokens": tokens}


@derivation
def draft_places(ids: torch.Tensor, *, vocab: int) -> torch.Tensor:
    """Where each token of the vocabulary stands among ids i64[D]; 0 for those that do not."""
    places = torch.zeros(vocab, dtype=torch.int64)
    return places.index_copy(0, ids, torch.arange(len(ids)))


@derivation
def draft_absent(ids: torch.Tensor, *, vocab: int) -> torch.Tensor:
    """Which tokens of the vocabulary are not among ids i64[D]."""
    return torch.ones(vocab, dtype=torch.bool).index_fill(0, ids, False)


def most_frequent(tokens: Sequence[int], size: int) -> torch.Tensor:
    """The ids of the `size` most frequent tokens, i64[size], rising; fewer if there are fewer."""
    counts = Counter(token for token in tokens if token >= 0)
    best = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(best), dtype=torch.int64)
