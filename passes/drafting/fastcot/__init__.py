"""Jacobi decoding whose guesses are not waited for: the answer is written behind them.

Source: Zhang et al., "Fast Chain-of-Thought: A Glimpse of Future from Parallel Decoding Leads to
Answers Faster" (FastCoT, 2023). Every step commits what the target itself says, one token or more,
and refines a window of approximate tokens behind that. After some steps what the window holds
stands as it is, and what is written then, behind words that ask for the answer, sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import torch
from pydantic import Field

from ....ir import InputError
from ....ir.plan import policy, record
from ....ir.plan.bounds import MOST_NODES, Place
from ....ir.plan.contract import Contract
from ....ir.plan.verify import VerifyRecord
from ....runtime.asking.request import Request
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.speculate.drafters.base import DRAFTERS
from ....runtime.speculate.sampling import Array
from ....runtime.speculate.setting import Setting
from ....runtime.speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS
from ....runtime.speculate.verifiers.relaxed import RelaxedVerifier
from ..jacobi import JacobiDraft, JacobiDrafter

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan

Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
Answer = Annotated[tuple[Place, ...], Field(max_length=MOST_NODES)]


@record
@dataclass(frozen=True)
class Glimpse(VerifyRecord):
    """Keep the target's likeliest tokens, and once, in a text's step behind `steps` others with a
    draft, the whole draft (FastCoT)."""

    steps: Steps = 32
    kind: ClassVar[str] = "glimpse"


@policy
@dataclass(frozen=True)
class FastCotDraft(JacobiDraft):
    """A block of guesses that every step refines, and that stands as it is after some steps.

    FastCoT (Zhang et al. 2023). tokens: of the block. steps: that refine it before it stands.
    answer: ids of the tokens that are put behind it then, such as those that ask for the answer.
    Guesses end at the model's end of text. Needs the step's ``argmax`` (pass add_argmax).
    """

    steps: Steps = 32
    answer: Answer = ()
    kind: ClassVar[str] = "fastcot"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    brings: ClassVar[str] = "tokens that ask for the answer"

    @property
    def most(self) -> int:
        return self.tokens + len(self.answer)

    def into(self, plan: DecodePlan) -> DecodePlan:
        """The plan with the drafter, and with the verifier that lets its guesses stand. Errors: as
        `Record.into`, of either; `InputError` if nothing asks for the answer."""
        if not self.answer:
            raise InputError(
                "draft_fastcot.answer is empty: what this method saves is the text between its "
                "guesses and the answer, and without tokens that ask for one it has a block of "
                "guesses to verify in every step and nothing to gain. Set answer to the ids of "
                "words that do, such as tokenizer.encode(' So the answer is').ids; to write a "
                "whole text faster, take jacobi or copyspec"
            )
        return Glimpse(self.steps).into(super().into(plan))

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`."""
        if plan.draft != self or plan.verify != Glimpse(self.steps):
            yield (
                f"draft={self.brief} is for verify={Glimpse(self.steps)} alone, which would keep "
                f"what others draft, too; got draft={plan.draft.brief}, verify={plan.verify.brief}"
            )


@DRAFTERS.register(FastCotDraft)
class FastCotDrafter(JacobiDrafter):
    """Counts the steps of each text. See the module docstring."""

    record: FastCotDraft

    def __init__(self, record: FastCotDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        info = self.executable.program.info
        self.ends = frozenset(info.eos)
        strange = [token for token in record.answer if token >= info.vocab_size]
        if strange:
            raise InputError(
                f"draft_fastcot.answer has the token {strange[0]}, outside the vocabulary of "
                f"{info.vocab_size}: give ids of {info.model_type}'s tokenizer"
            )

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.taken = [0] * len(prompts)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        drafts = super().propose(rooms)
        for index, room in enumerate(rooms):
            if room > 0 and self.taken[index] == self.record.steps:
                drafts[index] = self._standing(index, room)
        return drafts

    def _standing(self, index: int, room: int) -> Draft:
        """The guesses up to an end of text, and what is to follow them."""
        block = self.blocks[index]
        end = next((n for n, token in enumerate(block) if token in self.ends), len(block))
        tokens = [*block[:end], *self.record.answer][:room]
        return Draft(tokens) if tokens else NO_DRAFT

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            self.taken[index] += bool(tokens and draft.tokens)


@VERIFIERS.register(Glimpse, GREEDY)
@VERIFIERS.register(Glimpse, SAMPLING)
class GlimpseVerifier(RelaxedVerifier):
    """A token passes if none is likelier; in one step of each text all do."""

    record: Glimpse

    def begin(self, request: Request) -> None:
        super().begin(request)
        self.taken = [0] * len(request.texts)

    def bounds(self, probs: Array) -> Array:
        found: Array = probs.max(-1)
        return found

    def _paths(
        self, scores: torch.Tensor, first: Mapping[int, int], drafts: Sequence[Draft]
    ) -> dict[int, list[int]]:
        paths = super()._paths(scores, first, drafts)
        for index in first:
            count = len(drafts[index].tokens)
            if count and self.taken[index] == self.record.steps:
                paths[index] = list(range(count))
            self.taken[index] += bool(count)
        return paths
