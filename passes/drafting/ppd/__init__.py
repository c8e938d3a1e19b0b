"""Prompt tokens that ride along with every step and predict the places ahead.

Source: Chen et al., "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference" (PPD, 2024).

The output at the k-th prompt token behind a node predicts the token k + 1 places after that node.
The prompt tokens behind the node where verification ends make the next draft. Prompt tokens go
behind the nodes where verification likeliest ends by the draft's own probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir import type_of
from ....ir.plan import DecodePlan, LearningDraft, Returned, Size, record
from ....ir.plan.bounds import Factor, Filled, Levels, Nodes
from ....runtime.feeding.draft import Draft, VerifiedStep
from ....runtime.speculate.level import Ids, Level, Scores
from ....runtime.speculate.proposers.base import PROPOSERS, ByDepth
from ....runtime.speculate.setting import Setting


@dataclass(frozen=True)
class RidingDraft(LearningDraft):
    """Base of drafters whose tokens ride behind the nodes of a draft and predict the places ahead.

    The step takes the ids vocabulary + 0, 1, ... for them, and returns the best ``draft_tokens``
    and ``draft_scores`` (log probabilities) [B,S,K] after every token. prompts: in a row behind a
    node, and so the places that are predicted. after: nodes that get some, the root counted: those
    where verification will likeliest end. decay: in training, the weight of level d's loss is
    decay^d.
    """

    prompts: Levels = 3
    after: Nodes = 8
    decay: Factor = 0.8
    trained: Filled[bool] = False
    grows: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("draft_tokens", "draft_scores")

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield plan.step.plain, {"draft_tokens": ("", "", "K"), "draft_scores": ("", "", "K")}

    @property
    def levels(self) -> int:
        return self.prompts

    def riders(self, nodes: int) -> int:
        """`prompts` for each node that gets some."""
        return self.prompts * min(self.after, nodes + 1)


@record
@dataclass(frozen=True)
class PromptDraft(RidingDraft):
    """Prompt tokens behind the nodes of a draft, which predict the places ahead (PPD). weight:
    f[prompts,H], their trained embeddings."""

    weight: Filled[str] = "ppd.prompts"
    kind: ClassVar[str] = "prompts"

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        yield self.weight, False, (self.prompts, "")


UNLIKELY = -30.0
"""Log probability of what is no candidate."""


@PROPOSERS.register(PromptDraft)
class PromptProposer(ByDepth):
    """Level d's candidates are those of prompt token d, for every node of that depth.

    tokens: i64[B,M,K], scores: f32[B,M,K], what the M prompt tokens said after the text; tokens are
    -1 where none were fed. logits: f32[B,M,V] if the tree samples from whole distributions.
    """

    record: RidingDraft

    def __init__(self, record: RidingDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        program, self.many = self.executable.program, record.prompts
        self.vocabulary = program.info.vocab_size
        self.candidates = int(str(type_of(program.step.outputs["draft_tokens"]).dims[-1]))
        self.riders = tuple(range(self.vocabulary, self.vocabulary + record.prompts))
        self.wants = ("draft_tokens", "draft_scores")
        self.samples = program.plan.tree.samples
        if self.samples:
            self.wants = (*self.wants, "logits")

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        shape = (len(prompts), self.many, self.candidates)
        self.tokens: Ids = np.full(shape, -1, dtype=np.int64)
        self.scores: Scores = np.full(shape, UNLIKELY, dtype=np.float32)
        self.logits: Scores | None = None
        if self.samples:
            whole = (len(prompts), self.many, self.vocabulary)
            self.logits = np.zeros(whole, dtype=np.float32)

    def level(self, count: int) -> Level:
        place = slice(self.place, self.place + 1)
        logits = None if self.logits is None else self.logits[:, place]
        return Level(self.tokens[:, place, :count], self.scores[:, place, :count], logits)

    def ride(self, drafts: list[Draft], rooms: Sequence[int]) -> list[Draft]:
        """Prompt tokens behind the nodes where verification will likeliest end."""
        return [
            self._ridden(draft, index) if room > 0 else draft
            for index, (draft, room) in enumerate(zip(drafts, rooms, strict=True))
        ]

    def _ridden(self, draft: Draft, index: int) -> Draft:
        size = len(draft.tokens)
        follows: list[int] = []
        for node in self._ends(draft, index)[: self.record.after]:
            behind = size + len(follows)
            follows += [node, *range(behind, behind + self.many - 1)]
        return draft.riding([*self.riders] * (len(follows) // self.many), follows)

    def _ends(self, draft: Draft, index: int) -> list[int]:
        """The nodes, -1 among them, those first where verification likeliest ends."""
        chances = [1.0] * (len(draft.tokens) + 1)
        ends = list(chances)
        rows = zip(self.tokens[index].tolist(), self.scores[index].tolist(), strict=True)
        known = [dict(zip(*row, strict=True)) for row in rows]
        depths = draft.shape.depths
        above = draft.parents or range(-1, len(draft.tokens) - 1)
        for node, (token, parent) in enumerate(zip(draft.tokens, above, strict=True)):
            score = known[depths[node] - 1].get(token, UNLIKELY)
            chance = chances[parent + 1] * math.exp(score)
            chances[node + 1] = ends[node + 1] = chance
            ends[parent + 1] -= chance
        order = sorted(range(len(ends)), key=lambda column: -ends[column])
        return [column - 1 for column in order]

    def observe(self, taken: VerifiedStep) -> None:
        for index, tokens in enumerate(taken.tokens):
            if not tokens:
                continue
            draft, path = taken.drafts[index], taken.paths[index]
            column = _behind(draft, path[-1] if path else -1, self.riders)
            if column is None:
                self.tokens[index] = -1
                continue
            said = slice(column, column + self.many)
            self.tokens[index] = taken.outputs["draft_tokens"][index, said].cpu().numpy()
            self.scores[index] = taken.outputs["draft_scores"][index, said].float().cpu().numpy()
            if self.logits is not None:
                self.logits[index] = taken.outputs["logits"][index, said].float().cpu().numpy()


def _behind(draft: Draft, node: int, riders: Sequence[int]) -> int | None:
    """The column of the step where the prompt tokens behind a node begin, if it has some."""
    for place, (column, rider) in enumerate(zip(draft.follows, draft.riders, strict=True)):
        if column == node and rider == riders[0]:
            return 1 + len(draft.tokens) + place
    return None
