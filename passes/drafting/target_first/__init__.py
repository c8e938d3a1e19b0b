"""Begin drafts with tokens that the target itself holds for likely, and keep the longest branch.

Source: Lu et al., "Improving Multi-candidate Speculative Decoding" (2024), and its public code
(DynaSD): the target model initialized multi-candidate process.

What the target says after the last token that was accepted is not made into a token: its likeliest
tokens (under sampling, some that are sampled from it without replacement) become the first level
of the next draft, and the drafter goes on from each. The first level is accepted as it is, since
any of it is the target's own; below it each token is judged by itself, and the branch that goes on
longest is kept. So which of the target's tokens is taken depends on what is easy to draft: the
text is not the target's own. With one token in the first level it is.

A step is fed the text's last token. So the last token that is accepted counts as what the target
chose: it has no row yet, and is fed again at the head of the next draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ....ir import InputError, Program
from ....ir.plan import DraftRecord, NoDraft, VerifyRecord, policy, record
from ....ir.plan.bounds import Filled
from ....ir.plan.contract import Contract
from ....runtime.asking.options import GenerationOptions
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS, Proposer
from ....runtime.speculate.proposers.hidden import best_of
from ....runtime.speculate.sampling import Array, Chances, StepToVerify, best, warp, whole
from ....runtime.speculate.setting import Setting
from ....runtime.speculate.verifiers.base import (
    GREEDY,
    NOTHING_GAINED,
    SAMPLING,
    VERIFIERS,
    Verdict,
    Verifier,
)
from ....runtime.speculate.verifiers.rejection import without

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan


@record
@dataclass(frozen=True)
class LongestBranch(VerifyRecord):
    """Keep the first level of a draft that began with the target's tokens, and of its branches the
    longest that the target agrees with."""

    kind: ClassVar[str] = "longest"
    begun: ClassVar[bool] = True


@policy
@dataclass(frozen=True)
class TargetFirstDraft(DraftRecord):
    """The plan's drafter, whose drafts begin with the target's own candidates (improved MCSD).

    draft: predicts what follows them, level by level. As many candidates as the plan's tree has in
    its first level. Puts `LongestBranch` into a plan whose verifier is not one for such drafts.
    """

    draft: Filled[DraftRecord] = field(default_factory=NoDraft)
    kind: ClassVar[str] = "target_first"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "trees"})
    provides: ClassVar[frozenset[str]] = frozenset()
    grows: ClassVar[bool] = True
    begins: ClassVar[bool] = True

    @property
    def core(self) -> DraftRecord:
        return self.draft

    def into(self, plan: DecodePlan) -> DecodePlan:
        """See `Record.into`. Errors: `InputError` for a drafter that does not predict level by
        level, and for several."""
        if not plan.draft.grows or plan.draft.parts or plan.draft.begins:
            raise InputError(
                f"expected one drafter that predicts level by level, such as draft_model, got "
                f"draft={plan.draft.brief}"
            )
        if not plan.verify.begun:
            plan = LongestBranch().into(plan)
        return replace(plan, draft=replace(self, draft=plan.draft))


@PROPOSERS.register(TargetFirstDraft)
class TargetFirstProposer(Proposer):
    """firsts: f32[V] for each sequence, log probabilities that the next draft's first level is
    taken from, after the user's options when sampling; None: the drafter's own are. rejects:
    whether what a draft had behind its last node was rejected."""

    record: TargetFirstDraft

    def __init__(self, record: TargetFirstDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.inner = self.follower = PROPOSERS.find(record.draft)(record.draft, setting)
        self.wants = tuple(dict.fromkeys((*self.inner.wants, "logits")))
        self.reads = self.inner.reads
        self.rejects = setting.executable.program.plan.verify.kind == LongestBranch.kind

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.firsts: list[Array | None] = [None] * len(prompts)

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        logits = taken.outputs["logits"]
        rows = zip(taken.drafts, taken.paths, taken.tokens, strict=True)
        for index, (draft, path, tokens) in enumerate(rows):
            node = last_node(draft, path, tokens)
            self.firsts[index] = None
            if node is not None:
                row = logits[index, node + 1].to("cpu", torch.float32)
                rejected = draft if self.rejects else NO_DRAFT
                self.firsts[index] = following(row, rejected, node, self.options)

    def root(self, count: int) -> Level:
        level = self.inner.root(count)
        if all(first is None for first in self.firsts):
            return level
        return _begun(level, self.firsts, count, self.options)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        return self.inner.grow(tokens, parents, count)


def last_node(draft: Draft, path: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The draft's node that is the text's last token, if it is one.

    >>> last_node(Draft([5, 6, 7], None, (-1, -1, 1)), [1], [6, 7])
    2
    """
    if len(tokens) != len(path) + 1:
        return None
    siblings = draft.children().get(path[-1] if path else -1, [])
    return next((node for node in siblings if draft.tokens[node] == tokens[-1]), None)


def following(row: torch.Tensor, draft: Draft, node: int, options: GenerationOptions) -> Array:
    """Log probabilities f32[V] of what follows a node, after which the target says `row` f32[V]:
    when sampling, what is left of them after the node's children were rejected."""
    if not options.do_sample:
        found: Array = row.log_softmax(-1).numpy()
        return found
    chances = warp(row[None], options)
    children = draft.children().get(node, [])
    if draft.probs is not None and children:
        given = draft.probs[children[0]].numpy()
        for child in children:
            chances.subtract(0, given)
            given = without(given, draft.tokens[child])
    with np.errstate(divide="ignore"):
        left: Array = np.log(whole(chances, len(row))[0].numpy())
    return left


def _begun(
    level: Level, firsts: Sequence[Array | None], count: int, options: GenerationOptions
) -> Level:
    """The first level: what the target says, or the drafter where that is not known."""
    vocabulary = next(len(first) for first in firsts if first is not None)
    rows = np.full((len(firsts), vocabulary), -np.inf, dtype=np.float32)
    tokens = np.full((len(firsts), 1, count), -1, dtype=np.int64)
    scores = np.zeros(tokens.shape, dtype=np.float32)
    for index, first in enumerate(firsts):
        if first is not None:
            rows[index] = first
        elif level.logits is not None and level.tokens[index, 0, 0] >= 0:
            own = torch.from_numpy(level.logits[index]).float()
            shown = warp(own, options) if options.do_sample else None
            chances = own.softmax(-1) if shown is None else whole(shown, vocabulary)
            rows[index] = chances[0].log().numpy()
        else:
            size = min(count, level.tokens.shape[-1])
            tokens[index, 0, :size] = level.tokens[index, 0, :size]
            scores[index, 0, :size] = level.scores[index, 0, :size]
            continue
        likely = best_of(torch.from_numpy(rows[index : index + 1, None]), min(count, vocabulary))
        known = np.isfinite(likely.scores[0, 0])
        tokens[index, 0, : len(known)] = np.where(known, likely.tokens[0, 0], -1)
        scores[index, 0, : len(known)] = np.where(known, likely.scores[0, 0], 0)
    return Level(tokens, scores, rows[:, None], warped=True)


@VERIFIERS.register(LongestBranch, GREEDY)
@VERIFIERS.register(LongestBranch, SAMPLING)
class LongestVerifier(Verifier):
    """begun: whether each sequence's next draft begins with the target's tokens. A token that the
    user's options forbid is never kept. See the module docstring."""

    def __init__(
        self, record: LongestBranch, program: Program, options: GenerationOptions, batch: int
    ) -> None:
        super().__init__(record, program, options, batch)
        self.begun = [False] * batch

    def verify(self, step: StepToVerify) -> list[Verdict]:
        scores, owners = self.scorer.rows(step)
        rows = self._sampled(scores) if self.options.do_sample else _Best(scores)
        verdicts = [NOTHING_GAINED] * len(step.drafts)
        for row, (index, node) in enumerate(owners):
            if node < 0:
                verdicts[index] = self._verdict(index, step.drafts[index], row, rows)
        return verdicts

    def _sampled(self, scores: torch.Tensor) -> _Sampled:
        return _Sampled(self.scorer.warp(scores), self.options)

    def _verdict(self, index: int, draft: Draft, root: int, rows: _Rows) -> Verdict:
        path = draft.path(self._longest(index, draft, root, rows))
        if not path:  # the target's own token, which may be one of the draft's all the same
            token = rows.own(root)
            self.begun[index] = last_node(draft, (), (token,)) is not None
            return Verdict((), [token])
        self.begun[index] = True
        return Verdict(path[:-1], [draft.tokens[node] for node in path])

    def _longest(self, index: int, draft: Draft, root: int, rows: _Rows) -> int:
        """The last node of the longest branch that is accepted, of equal ones the first; -1: none
        is."""
        depths, last = {-1: 0}, -1
        for node, token in enumerate(draft.tokens):
            parent = node - 1 if draft.parents is None else draft.parents[node]
            if parent not in depths or (index, node) in self.scorer.dead:
                continue
            row, given = root + parent + 1, 1.0
            if draft.probs is not None:
                given = float(draft.probs[node][token])
            begun = parent < 0 and self.begun[index]
            if rows.allows(row, token) if begun else rows.takes(row, token, given):
                depths[node] = depths[parent] + 1
                last = node if depths[node] > depths[last] else last
        return last


class _Rows(ABC):
    """What the target says, row by row."""

    @abstractmethod
    def allows(self, row: int, token: int) -> bool:
        """Whether the user's options leave a token any chance."""

    @abstractmethod
    def takes(self, row: int, token: int, given: float) -> bool:
        """Whether a drafted token is accepted, which the draft gave this probability."""

    @abstractmethod
    def own(self, row: int) -> int:
        """A token of the target's own choice."""


class _Best(_Rows):
    """Greedy decoding takes the best token. Errors: `InputError` for NaN rows."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores, self.best = scores, best(scores)

    def allows(self, row: int, token: int) -> bool:
        return float(self.scores[row, token]) > float("-inf")

    def takes(self, row: int, token: int, given: float) -> bool:
        return self.best[row] == token

    def own(self, row: int) -> int:
        return self.best[row]


class _Sampled(_Rows):
    """Sampling accepts a token with min(1, p / q)."""

    def __init__(self, chances: Chances, options: GenerationOptions) -> None:
        self.chances, self.options = chances, options

    def allows(self, row: int, token: int) -> bool:
        return self.chances.of([row], [token])[0] > 0

    def takes(self, row: int, token: int, given: float) -> bool:
        return self._point() * given < self.chances.of([row], [token])[0]

    def own(self, row: int) -> int:
        return self.chances.token(row, self._point())

    def _point(self) -> float:
        return float(torch.rand(1, dtype=torch.float64, generator=self.options.random()))
