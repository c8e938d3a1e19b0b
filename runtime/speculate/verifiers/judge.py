"""Judge decoding: what the target would not have said may be good enough all the same.

Source: Bachmann et al., "Judge Decoding: Faster Speculative Sampling Requires Going Beyond Model
Alignment" (2025). The target has read each draft token when it verifies the draft, and a linear
head on that state tells mistakes from tokens that merely differ. Tokens that ordinary verification
accepts are accepted; of rejected siblings the first that the judge lets pass is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ....ir import Program, run, type_of
from ....ir.plan import Judge
from ...asking.options import GenerationOptions
from ...feeding.draft import Draft
from ..sampling import StepToVerify
from .base import GREEDY, NOTHING_GAINED, SAMPLING, VERIFIERS, Verdict, Verifier, on_host
from .greedy import GreedyVerifier
from .rejection import RejectionVerifier


class _Judging(Verifier):
    """Mixed into an ordinary verifier, before it: gives it a judge to ask.

    judge: the program of its function alone, which runs on the host: it is one row of weights.
    """

    record: Judge

    def __init__(
        self, record: Judge, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.scorer.best_only = False
        self.judge = on_host(program, record.function)
        self.dtype = type_of(self.judge.function(record.function).input("hidden")).dtype
        self.fetch = (*self.fetch, record.output)

    def judged(self, step: StepToVerify) -> list[frozenset[int]]:
        """For each sequence the draft nodes that may stay."""
        drafts = step.drafts
        if self.record.threshold >= 1 or not any(draft.tokens for draft in drafts):
            return [frozenset()] * len(drafts)
        # Column 0 is the last committed token.
        widest = 1 + max(len(draft.tokens) for draft in drafts)
        hidden = step.outputs[self.record.output][: len(drafts), 1:widest].to("cpu", self.dtype)
        judged = run(self.judge, self.record.function, {"hidden": hidden})["judged"]
        passes = judged[..., 0].float().sigmoid() > self.record.threshold
        return [
            frozenset(node for node in range(len(draft.tokens)) if row[node])
            for draft, row in zip(drafts, passes.tolist(), strict=True)
        ]


@VERIFIERS.register(Judge, GREEDY)
class JudgeGreedy(_Judging, GreedyVerifier):
    """Follow the argmax where a child has it, else the first child that passes."""

    def verify(self, step: StepToVerify) -> list[Verdict]:
        choices, passing = self._choices(step), self.judged(step)
        verdicts = []
        each = zip(step.texts, choices, step.drafts, passing, strict=True)
        for index, (text, row, draft, nodes) in enumerate(each):
            nodes -= {node for i, node in self.scorer.dead if i == index}
            path = [] if text.done else _walked(row, draft, nodes)
            verdicts.append(NOTHING_GAINED if text.done else self._verdict(row, draft, path))
        return verdicts


def _walked(row: Sequence[int], draft: Draft, passing: Collection[int]) -> list[int]:
    children, path, at = draft.children(), [], -1
    while at in children:
        siblings, wanted = children[at], row[at + 1]
        right = next((node for node in siblings if draft.tokens[node] == wanted), None)
        taken = next((n for n in siblings if n in passing), None) if right is None else right
        if taken is None:
            break
        path.append(taken)
        at = taken
    return path


@VERIFIERS.register(Judge, SAMPLING)
class JudgeSampling(_Judging, RejectionVerifier):
    """Speculative rejection, with the judge's pardon for what it rejects."""

    def verify(self, step: StepToVerify) -> list[Verdict]:
        nodes = self.judged(step)
        each = enumerate(zip(step.drafts, nodes, strict=True))
        self.passing = {id(draft): (index, kept) for index, (draft, kept) in each}
        return super().verify(step)

    def _pardoned(self, draft: Draft, siblings: Sequence[int]) -> int | None:
        index, passing = self.passing[id(draft)]
        kept = (n for n in siblings if n in passing and (index, n) not in self.scorer.dead)
        return next(kept, None)
