"""A step whose tokens may be mixtures, and how several texts are drafted by it at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeAlias

from pydantic import Field

from .base import Size, record
from .bounds import Amount, Factor, Filled, Share
from .contract import Contract
from .step import StepRecord
from .verify import Lossless

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan

MOST_DRAFTS = 64
"""Texts that one row of a batch may stand for."""

Drafts: TypeAlias = Annotated[int, Field(ge=2, le=MOST_DRAFTS)]
Spread: TypeAlias = Annotated[int, Field(ge=1, le=16)]
Orders: TypeAlias = Annotated[tuple[Amount, ...], Field(min_length=1, max_length=8)]


@record
class SuperposedStep(StepRecord):
    """A step is one call of `function`, which may be fed a mixture of tokens in a token's place.

    A call that asks for several texts of a prompt without sampling gets `drafts` of them at most
    out of one row of the batch (Superposed Decoding, Shen et al. 2024): each step is fed the mean
    of their last tokens' embeddings, weighted by their probabilities, and its likeliest tokens, as
    many as there are drafts times `spread`, may follow any of them. With `alpha` as the n-gram
    models' weight a draft's probability grows by

        (1 - alpha) log p + alpha log q

    where p is the step's distribution at `temperature` among those tokens, and q the n-gram models'
    behind that draft: `orders`[i] is the weight of the one that looks at the last i tokens.
    penalty: what a draft loses behind which the n-gram models know none of the tokens. weight:
    i64[N] of the program, the text that n-grams are counted in, -1 behind each document; none:
    there is no smoothing, and alpha is 0. All other calls run as without it.
    """

    function: Filled[str] = "step"
    weight: Filled[str | None] = None
    drafts: Drafts = 8
    spread: Spread = 3
    temperature: Factor = 0.06
    alpha: Share = 0.54
    orders: Orders = (0.0, 0.01, 0.04, 0.15, 0.18, 0.12)
    penalty: Amount = 200.0
    kind: ClassVar[str] = "superposed"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        if self.weight is not None:
            yield self.weight, True, ("",)

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: what looks at one text where there are several."""
        who = f"step={self.kind} keeps several texts in one row"
        if plan.speculates:
            yield (
                f"{who}, and draft={plan.draft.brief} drafts for one: leave the drafter out, or "
                f"superpose"
            )
        if plan.verify != Lossless():
            yield f"{who}, and verify={plan.verify.brief} judges one: leave one of the two out"
        if plan.depth.stops:
            yield (
                f"{who}, and depth={plan.depth.brief} decides by one how deep it goes: leave one "
                f"of the two out"
            )
        if plan.source.encoder is not None:
            yield f"{who}, and is for models that read no source"
