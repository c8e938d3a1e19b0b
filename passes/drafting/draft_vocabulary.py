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

from ...ir import TensorType, Weight
from .grafts import Graft

A = torch.ops.aten

ABSENT = -30000.0
"""The logit of a token that a draft does not know: finite, and exp of it is 0 in every dtype."""


@dataclass(frozen=True)
class DraftVocabulary:
    """D tokens of a target's V. name: prefix of its weights; ids: i64[D], rising, which they
    are."""

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
        places, ids, vocab = torch.zeros(self.vocab, dtype=torch.int64), self.ids, self.vocab

        def place() -> torch.Tensor:
            return places.index_copy(0, ids, torch.arange(size))

        def absent() -> torch.Tensor:
            return torch.ones(vocab, dtype=torch.bool).index_fill(0, ids, False)

        table = graft.call(A.unsqueeze.default, graft.constant(offsets), -1)
        offset = graft.call(A.embedding.default, table, found["draft_tokens"])
        offset = graft.call(A.squeeze.dim, offset, -1)
        tokens = graft.call(A.add.Tensor, found["draft_tokens"], offset)
        columns = Weight(f"{self.name}.places", TensorType(torch.int64, (vocab,)), place)
        missing = Weight(f"{self.name}.absent", TensorType(torch.bool, (vocab,)), absent)
        spread = graft.call(A.index_select.default, logits, -1, graft.constant(columns))
        whole = graft.call(A.masked_fill.Scalar, spread, graft.constant(missing), ABSENT)
        return {**found, "draft_logits": whole, "draft_tokens": tokens}


def most_frequent(tokens: Sequence[int], size: int) -> torch.Tensor:
    """The ids of the `size` most frequent tokens, i64[size], rising; fewer if there are fewer."""
    counts = Counter(token for token in tokens if token >= 0)
    best = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(best), dtype=torch.int64)
