"""Choose each token by what becomes of the text with it.

Source: Chakraborty et al., "Transfer Q*: Principled Decoding for LLM Alignment" (2024), direct
transfer. The value of a token z after the text s is the reward of the text that an aligned model
goes on to write after [s, z]. With p the model's own distribution, the next token is one of p's
likeliest, by p(z | s) exp(Q(s, z) / alpha).

The candidates are the first level of a draft (`TargetFirstDraft`), and what the aligned model
writes after each is the rest of its branch, so one step reads and rewards all of them. Nothing of
it is kept but the token that is chosen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isnan
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import torch

from ....ir import Program
from ....ir.plan import Returned, VerifyRecord, record
from ....ir.plan.bounds import Factor, Filled
from ....runtime.asking.checks import bad_logits
from ....runtime.asking.options import GenerationOptions
from ....runtime.feeding.draft import NO_DRAFT, Draft
from ....runtime.speculate.sampling import Chances, StepToVerify, best, whole
from ....runtime.speculate.verifiers.base import GREEDY, SAMPLING, VERIFIERS, Verdict, Verifier
from ....runtime.speculate.verifiers.greedy import GreedyVerifier
from ....runtime.speculate.verifiers.rejection import RejectionVerifier

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan


@record
class Valued(VerifyRecord):
    """Choose one of the tokens that a draft begins with, by p(z) exp(Q(z) / `alpha`) (Transfer Q*).

    p: the target's distribution, after the call's own options. Q(z): the mean reward of the texts
    that the draft continues z to, each up to its end. guest: the function of the reward model,
    which reads along (`Accompanied`) and returns rewards [B,T] of the text up to each token. One
    token a step, the target's own where nothing is drafted. Source: Chakraborty et al., "Transfer
    Q*: Principled Decoding for LLM Alignment" (2024).
    """

    alpha: Factor = 1.0
    guest: Filled[str] = "reward"
    kind: ClassVar[str] = "valued"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    begun: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.along(plan, self.guest), {self.guest: ("", "")}

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: drafts that are left out where they bring no more tokens."""
        if plan.length.gives_up:
            yield (
                f"verify={self.brief} keeps one token of a draft, whatever it costs, and length="
                f"{plan.length.brief} gives such drafts up: leave that out"
            )


def values(draft: Draft, rewards: Sequence[float], ends: Collection[int]) -> dict[int, float]:
    """For each token that a draft begins with the mean reward of the texts below it. rewards: of
    the text before the draft, and with each node. ends: tokens that end a text.

    >>> values(Draft([5, 6, 8, 7], None, (-1, -1, 0, 0)), [0.0, 0.1, 0.9, 0.2, 0.4], ends=())
    {5: 0.30000000000000004, 6: 0.9}
    """
    children, found = draft.children(), dict[int, list[float]]()

    def collect(node: int, rewarded: list[float]) -> None:
        below = () if draft.tokens[node] in ends else children.get(node, ())
        for child in below:
            collect(child, rewarded)
        if not below:
            rewarded.append(rewards[node + 1])

    for node in children.get(-1, ()):
        collect(node, found.setdefault(draft.tokens[node], []))
    return {token: fmean(rewarded) for token, rewarded in found.items()}


class _Valuing(Verifier):
    """Mixed into an ordinary verifier, before it: that verifies steps without drafts. begun: what
    each sequence's draft begins with."""

    record: Valued
    beyond: ClassVar[int] = 1  # no token of the target's follows a draft

    def __init__(
        self, record: Valued, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.fetch = ("logits", record.guest)
        self.ends = frozenset(options.eos(program.info))
        self.begun: list[dict[int, float]] = []

    def verify(self, step: StepToVerify) -> list[Verdict]:
        rewards = step.outputs.get(self.record.guest)
        self.begun = [
            values(draft, rewards[index].tolist(), self.ends)
            if rewards is not None and draft.tokens and not text.done
            else {}
            for index, (text, draft) in enumerate(zip(step.texts, step.drafts, strict=True))
        ]
        if any(isnan(value) for begun in self.begun for value in begun.values()):
            raise bad_logits()
        return self.written(step._replace(drafts=[NO_DRAFT] * len(step.texts)))

    @abstractmethod
    def written(self, step: StepToVerify) -> list[Verdict]:
        """The ordinary verifier's verdicts."""

    def valued(self, chances: torch.Tensor, owners: Sequence[int]) -> torch.Tensor:
        """Log probabilities f32[R,V], up to a constant a row, of what is decoded instead of
        `chances` f32[R,V], which are logarithms, too. owners: each row's sequence."""
        result = chances.clone()
        for row, index in enumerate(owners):
            tokens = list(self.begun[index])
            worth = torch.tensor([self.begun[index][token] for token in tokens])
            chosen = chances[row, tokens] + worth / self.record.alpha
            if tokens and float(chosen.max()) > float("-inf"):  # else options rule all of them out
                result[row] = float("-inf")
                result[row, tokens] = chosen
        return result


@VERIFIERS.register(Valued, GREEDY)
class ValuedGreedy(_Valuing, GreedyVerifier):
    """The candidate that comes first."""

    argmax_suffices: ClassVar[bool] = False

    def written(self, step: StepToVerify) -> list[Verdict]:
        return GreedyVerifier.verify(self, step)

    def _scored(self, step: StepToVerify) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        scores, owners = self.scorer.rows(step)
        best(scores)  # that they are numbers
        scores = self.valued(scores.log_softmax(-1), [index for index, _ in owners])
        self.scorer.rescore(scores)
        return scores, owners


@VERIFIERS.register(Valued, SAMPLING)
class ValuedSampling(_Valuing, RejectionVerifier):
    """A candidate that is drawn."""

    def written(self, step: StepToVerify) -> list[Verdict]:
        return RejectionVerifier.verify(self, step)

    def _weighed(self, chances: Chances, first: Mapping[int, int], step: StepToVerify) -> Chances:
        own = whole(chances, self.program.info.vocab_size).log()
        return Chances(self.valued(own, list(first)).softmax(-1).numpy(), None)
