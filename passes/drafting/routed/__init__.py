"""The smaller model writes the answers to easy prompts, and the target those to hard ones.

Source: Damani et al., "Learning How Hard to Think: Input-Adaptive Allocation of LM Computation"
(2024), routing between a weak and a strong decoder: what is learned is how much the strong one
would gain, from the states that a model has of the prompt, and where that is little the weak one
answers.

The target reads along: what the smaller model writes is a draft that is kept as it is, so a text
may go on in a later turn whoever has written it, and the next turn is judged anew. Where the target
writes, drafts are verified as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from ....ir import Program, run, type_of
from ....ir.plan import Returned, VerifyRecord, record
from ....ir.plan.bounds import Filled, Share
from ....runtime.asking.checks import bad_logits
from ....runtime.asking.options import GenerationOptions
from ....runtime.asking.text import Text
from ....runtime.speculate.sampling import StepToVerify
from ....runtime.speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS, Verdict, on_host
from ....runtime.speculate.verifiers.greedy import GreedyVerifier
from ....runtime.speculate.verifiers.keeping import Keeping
from ....runtime.speculate.verifiers.rejection import RejectionVerifier

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan


@record
class Routed(VerifyRecord):
    """Keep all drafts of texts with easy prompts, and verify those of others (routing).

    function: takes ``hidden`` [B,T,H] and returns ``ease`` [B,T], the log odds of the share of the
    answer's tokens at which drafter and target agree. output: the step's output that it takes, of
    the prompt's last token. threshold: the share above which a prompt is easy; 1: none is.
    Untrained, it says even odds. Source: Damani et al., "Learning How Hard to Think" (2024).
    """

    function: Filled[str] = "routing"
    output: Filled[str] = "hidden.normed"
    threshold: Share = 0.8
    trained: Filled[bool] = False
    kind: ClassVar[str] = "routed"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})
    judges: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"ease": ("", "")}

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: drafts that are several texts."""
        if plan.tree.branches:
            yield (
                f"verify={self.brief} keeps a draft as it is, and tree={plan.tree.brief} makes "
                f"several: take tree_chain"
            )


class _Routing(Keeping):
    """Keeps all drafts of some texts. judge: the program of its function alone, which runs on the
    host: once a text. seen: by sequence, the text that was judged last; easy: whether it is."""

    record: Routed

    def __init__(
        self, record: Routed, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.judge = on_host(program, record.function)
        self.dtype = type_of(self.judge.function(record.function).input("hidden")).dtype
        self.begins = (record.output,)
        self.seen: list[Text | None] = [None] * batch
        self.easy = [False] * batch

    def verify(self, step: StepToVerify) -> list[Verdict]:
        for index, text in enumerate(step.texts):
            if self.seen[index] is not text and not text.done:
                self.seen[index], self.easy[index] = text, self._is_easy(step, index)
        return super().verify(step)

    def _is_easy(self, step: StepToVerify, index: int) -> bool:
        """Whether a prompt is, by the state of its last token."""
        if self.record.threshold >= 1:
            return False
        column = step.columns[index] if step.columns else 0
        state = step.outputs[self.record.output][index, column]
        hidden = state[None, None].to("cpu", self.dtype)
        odds = run(self.judge, self.record.function, {"hidden": hidden})["ease"]
        share = float(odds[0, 0].float().sigmoid())
        if math.isnan(share):
            raise bad_logits()
        return share > self.record.threshold

    def keeps(self, step: StepToVerify, index: int) -> bool:
        return self.easy[index]


@VERIFIERS.register(Routed, GREEDY)
class RoutedGreedy(_Routing, GreedyVerifier):
    """The draft, or as much of it as the target would have written."""

    def ordinary(self, step: StepToVerify) -> list[Verdict]:
        return GreedyVerifier.verify(self, step)


@VERIFIERS.register(Routed, SAMPLING)
class RoutedSampling(_Routing, RejectionVerifier):
    """The draft, or as much of it as keeps the target's distribution."""

    def ordinary(self, step: StepToVerify) -> list[Verdict]:
        return RejectionVerifier.verify(self, step)
