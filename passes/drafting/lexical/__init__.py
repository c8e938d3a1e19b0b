"""Lexical units: tokens in a row of which the target is sure at once.

Source: Sun et al., "Decoding at the Speed of Thought: Harnessing Parallel Decoding of Lexical Units
for LLMs" (Lexical Unit Decoding, 2024).

A step reads the text and [PAD] tokens behind it, and predicts the next token and those behind that
at once. The longest run of these, the next token first, each with a probability of `sure` at least,
is a lexical unit and is taken as it is, or the next token alone if that is less sure. Here the next
token is the step's own, and the rest of the unit is the next step's draft, which
`verify_vouched` takes; verified otherwise, the text is that of the target alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import Size, Vouched, record
from ....ir.plan.bounds import Filled, Inside, Part, Share
from ....runtime.feeding.draft import Draft, VerifiedStep
from ....runtime.speculate.level import Ids, Scores
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.setting import Setting
from ..ppd import PromptProposer, RidingDraft


@record
@dataclass(frozen=True)
class LexicalDraft(RidingDraft):
    """[PAD] tokens behind the text, which say the rest of a lexical unit (LUD).

    prompts: [PAD] tokens in a row, behind the last token of a draft that is not verified, else
    behind those where verification will likeliest end (`after`). weight: f[1,H], their embedding.
    sure: least probability of each token of a unit. unit: in training, the same of the tokens that
    make a unit of the text. beyond: the weight, in training, of [PAD] tokens that stand beyond a
    unit.
    """

    sure: Part = 0.9
    unit: Inside = 0.9
    beyond: Share = 0.3
    weight: Filled[str] = "lexical.pad"
    kind: ClassVar[str] = "lexical"
    vouches: ClassVar[bool] = True

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        yield self.weight, False, (1, "")


def unit_length(first: float, tokens: Ids, scores: Scores, sure: float) -> int:
    """How many of the tokens i64[M] behind a text's last one belong to its lexical unit.

    first: the log probability that the last token itself had; scores: f32[M], theirs. A unit ends
    before a token that is less sure than `sure`, and before one that repeats the one before it.

    >>> tokens, chances = np.array([7, 8, 8, 9]), np.array([0.95, 0.9, 0.99, 0.99])
    >>> [unit_length(np.log(p), tokens, np.log(chances), 0.9) for p in (0.92, 0.5)]
    [2, 0]
    """
    least = np.log(sure) - 1e-6  # a float32 logarithm of the threshold itself reaches it
    if first < least:
        return 0
    for place, (token, score) in enumerate(zip(tokens.tolist(), scores.tolist(), strict=True)):
        if score < least or token < 0 or (place and token == tokens[place - 1]):
            return place
    return len(tokens)


@PROPOSERS.register(LexicalDraft)
class LexicalProposer(PromptProposer):
    """Level d's candidates are what [PAD] token d says, within the unit."""

    record: LexicalDraft

    def __init__(self, record: LexicalDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.riders = (self.vocabulary,) * self.many
        self.taken_whole = isinstance(self.executable.program.plan.verify, Vouched)
        if self.taken_whole:  # sampled tokens need not be those that it is sure of
            self.samples, self.wants = False, ("draft_tokens", "draft_scores")

    def _ends(self, draft: Draft, index: int) -> list[int]:
        """A draft that nobody rejects ends with its last token."""
        if self.taken_whole and draft.parents is None:
            return [len(draft.tokens) - 1]
        return super()._ends(draft, index)

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        for index, tokens in enumerate(taken.tokens):
            if not tokens:
                continue
            path = taken.paths[index]
            column = 1 + path[-1] if path else 0
            said = taken.outputs["draft_tokens"][index, column].tolist()
            scores = taken.outputs["draft_scores"][index, column].float().tolist()
            first = dict(zip(said, scores, strict=True)).get(tokens[-1], -np.inf)
            own, chances = self.tokens[index, :, 0], self.scores[index, :, 0]
            self.tokens[index, unit_length(first, own, chances, self.record.sure) :] = -1
