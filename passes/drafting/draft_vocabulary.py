"""A draft's own vocabulary: fewer tokens than the target's, so that its head costs less.

What it builds, as IR (D of V tokens)::

    %i: i64[B,S,K] = %places + embedding(@d2t, %places)     # ids of the target's vocabulary
    %n: f32[B,S,V] = full_like(slice(%logits, -1, 0, 1), 0) + @absent   # all improbable, and
    %r: i64[B,S,D] = full_like(%logits, 0) + @ids
    %l: f32[B,S,V] = scatter(%n, -1, %r, %logits)           # what it knows as it says

So everything outside the function, samplers and verifiers included, sees the target's vocabulary:
a token that the draft does not know has probability zero in it, and is never proposed (Li et al.,
"EAGLE-3", 2025). Training alone sees the narrow logits (`narrow`), and chooses the tokens
(`chosen_by`): everything else is derived from @d2t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.fx

from ...ir import Function, PassError, Program, TensorType, Weight, derivation, derive, type_of
from ...ir.rewrite.cleanup import sweep
from .trained import TrainedWeights

A = torch.ops.aten

ABSENT = -30000.0
"""The logit of a token that a draft does not know: finite, and exp of it is 0 in every dtype."""

OFFSETS, IDS = ".d2t", ".ids"
"""Ends of names of weights: the distance of each token's id to its row in a draft's head, as
published drafts have it, and the ids."""


@dataclass(frozen=True)
class DraftVocabulary:
    """D tokens of a target's V. name: prefix of its weights; ids: i64[D], rising."""

    name: str
    vocab: int
    ids: torch.Tensor

    @classmethod
    def of(
        cls, trained: TrainedWeights, vocab: int, name: str, size: int
    ) -> DraftVocabulary | None:
        """The vocabulary of trained weights, or the `size` lowest ids; None: all tokens."""
        if trained:
            ids = _trained_ids(trained, vocab, f"{name}{OFFSETS}")
        else:
            ids = torch.arange(size) if 0 < size < vocab else None
        return None if ids is None else cls(name, vocab, ids)

    @property
    def offsets(self) -> Weight:
        """i64[D], the distance of each id to its row: everything else is derived from it."""
        return Weight.of(f"{self.name}{OFFSETS}", self.ids - torch.arange(len(self.ids)))

    @property
    def rows(self) -> Weight:
        """i64[D], the ids."""
        offsets = self.offsets
        return derive(f"{self.name}{IDS}", offsets.type, draft_ids, offsets)

    def widened(
        self,
        fn: Function,
        found: Mapping[str, torch.fx.Node],
        constant: Callable[[Weight], torch.fx.Node],
    ) -> dict[str, torch.fx.Node]:
        """Candidates of a function among the D tokens, in the target's vocabulary. constant: makes
        a reference to a weight."""
        name, vocab, rows = self.name, self.vocab, self.rows
        table = fn.call(A.unsqueeze.default, constant(rows.inputs[0]), -1)
        offset = fn.call(A.embedding.default, table, found["draft_tokens"])
        offset = fn.call(A.squeeze.dim, offset, -1)
        tokens = fn.call(A.add.Tensor, found["draft_tokens"], offset)
        logits = found["draft_logits"]
        type = TensorType(type_of(logits).dtype, (vocab,))
        absent = derive(f"{name}.absent", type, draft_absent, rows, vocab=vocab, dtype=type.dtype)
        nothing = fn.call(A.slice.Tensor, logits, -1, 0, 1)
        nothing = fn.call(A.full_like.default, nothing, 0)
        base = fn.call(A.add.Tensor, nothing, constant(absent))
        index = fn.call(A.full_like.default, logits, 0, dtype=torch.int64)
        index = fn.call(A.add.Tensor, index, constant(rows))
        whole = fn.call(A.scatter.src, base, -1, index, logits)
        return {**found, "draft_logits": whole, "draft_tokens": tokens}


def _trained_ids(trained: TrainedWeights, vocab: int, name: str) -> torch.Tensor | None:
    """The tokens of trained weights, i64[D], by each one's distance to its id; None: all.

    Errors: `PassError` for ids that are not some of the target's, or that contradict a t2d."""
    owner = trained.owner
    offsets = trained.find(name)
    if offsets is None:
        return None
    d2t = trained.read(offsets)
    if d2t.dtype != torch.int64 or d2t.dim() != 1 or not len(d2t):
        raise PassError(
            f"{owner}: {trained.path} has d2t as {trained.type_of(offsets)}, expected i64[D], an "
            f"offset for each row of its head"
        )
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        raise PassError(
            f"{owner}: {trained.path} maps draft tokens to {int(ids.min())}..{int(ids.max())}, "
            f"expected rising ids within 0..{vocab - 1}, the model's vocabulary"
        )
    if "t2d" in trained.names:
        t2d = trained.read("t2d")
        if t2d.shape != (vocab,) or not torch.equal(t2d.nonzero().flatten(), ids):
            raise PassError(
                f"{owner}: {trained.path} has a t2d {list(t2d.shape)} that contradicts its d2t; "
                f"expected bool[{vocab}], true for the {len(ids)} tokens that d2t names"
            )
    return None if len(ids) == vocab else ids


def narrow(program: Program, function: str) -> tuple[Function, torch.Tensor] | None:
    """A draft function that returns logits of the tokens that it knows alone, and their ids i64[D];
    None for one that knows all, or returns no logits."""
    logits = program.function(function).outputs.get("draft_logits")
    if logits is None or logits.target is not A.scatter.src:
        return None
    fn = program.function(function).copy()
    _, _, index, found = fn.outputs["draft_logits"].args
    assert isinstance(index, torch.fx.Node) and isinstance(found, torch.fx.Node)
    rows = index.all_input_nodes[-1]
    if not str(rows.target).endswith(IDS):
        return None
    fn.set_outputs({**fn.outputs, "draft_logits": found})
    sweep(fn)
    return fn, program.weights[str(rows.target)].load()


def chosen_by(program: Program, counts: torch.Tensor) -> Program:
    """The program with the most frequent tokens in all draft vocabularies, and whatever is derived
    from them. counts: i64[V], how often text has each; of equal ones the lowest ids."""
    order = counts.argsort(descending=True, stable=True)
    made = []
    for name, weight in program.weights.items():
        if name.endswith(OFFSETS):
            size = int(str(weight.type.dims[0]))
            ids = order[:size].sort().values
            made.append(Weight.of(name, ids - torch.arange(size)))
    return program.replace(weights=program.weights.replacing(*made))


@derivation
def draft_ids(offsets: torch.Tensor) -> torch.Tensor:
    """The tokens of a draft vocabulary, by the distance of each one's id to its row, i64[D]."""
    return offsets + torch.arange(len(offsets))


@derivation
def draft_absent(ids: torch.Tensor, *, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of what a draft does not know: `ABSENT`, and 0 for tokens of ids i64[D]."""
    return torch.full((vocab,), ABSENT, dtype=dtype).index_fill(0, ids, 0.0)
