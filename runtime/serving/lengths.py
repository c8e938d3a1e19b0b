"""How much the requests of a step draft: as much as makes all of them fastest together.

A draft widens the step for everyone, and others wait while it is made. So a request that asks what
its own drafts bring it finds that they cost little, as the step is wide already for those of the
others, and all of them draft where none should. Here what all gain is held against what all wait,
for each number of requests apart (Liu et al., "Optimizing Speculative Decoding for Serving Large
Language Models Using Goodput" (SmartSpec), 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...ir.execution.executable import Executable
from ...ir.plan import FixedLength, GoodputLength
from ..feeding.draft import VerifiedStep
from ..speculate.lengths.base import DelegatingPolicy, LengthPolicy
from ..speculate.lengths.goodput import GoodputPolicy


class BoundPolicy(DelegatingPolicy):
    """A request's own policy within what is decided for all. bound: draft tokens of its next step;
    0: none. late: seconds in which its drafter was brought up to the text."""

    bound = 0
    late = 0.0

    def limits(self, rooms: Sequence[int]) -> list[int]:
        if not self.bound:
            return [0] * len(rooms)
        return [min(self.bound, count) for count in self.of.limits(rooms)]

    def prepared(self, seconds: float) -> None:
        self.late = seconds


class SharedLengths:
    """What the steps of an executable's sequences have shown, by how many took part."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.record = executable, executable.program.plan.length
        self.policies: dict[int, GoodputPolicy] = {}

    def of(self, own: LengthPolicy) -> LengthPolicy:
        """The policy of a request, whose own it would be alone: where measured time decides, within
        what is decided for all."""
        return BoundPolicy(own.of) if isinstance(own, GoodputPolicy) else own

    def decide(self, requests: Sequence[tuple[LengthPolicy, int]]) -> None:
        """Before a step. requests: for each its policy, and levels that fit."""
        bound = [(own, room) for own, room in requests if isinstance(own, BoundPolicy)]
        if not bound:
            return
        sizes = self._policy(len(requests)).limits([room for _, room in bound])
        for (own, _), size in zip(bound, sizes, strict=True):
            own.bound, own.late = size, 0.0

    def observe(
        self, requests: Sequence[tuple[LengthPolicy, VerifiedStep]], drafting: float, step: float
    ) -> None:
        """After it. drafting: seconds that all drafts took, and `step` the step and its checks."""
        bound = [(own, taken) for own, taken in requests if isinstance(own, BoundPolicy)]
        if not bound:
            return
        policy = self._policy(len(requests))
        if late := sum(own.late for own, _ in bound):
            policy.prepared(late)
        policy.asked = [own.bound for own, _ in bound]
        drafts, paths, tokens = zip(
            *((t.drafts[0], t.paths[0], t.tokens[0]) for _, t in bound), strict=True
        )
        policy.observe(VerifiedStep(drafts, paths, tokens, [], {}), drafting, step)

    def _policy(self, count: int) -> GoodputPolicy:
        if count not in self.policies:
            assert isinstance(self.record, GoodputLength)
            record = replace(self.record, of=FixedLength())
            self.policies[count] = GoodputPolicy(record, self.executable, count)
        return self.policies[count]
