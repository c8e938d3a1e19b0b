"""Draft until a classifier of the draft's own predictions expects a rejection.

Source: Mamou et al., "Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large
Language Models" (DISCO, 2024).

After each drafted token a small network sees how sure the draft was of it: the probability of its
best token, the entropy of its prediction, and the token's place in the draft. The draft goes on as
long as the network holds it likely enough that the target accepts the token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ....ir import type_of
from ....ir.execution.executable import Executable
from ....ir.plan import LengthRecord, Returned, record
from ....ir.plan.bounds import Filled, Inside
from ....runtime.speculate.lengths.base import LENGTHS, Flags, LengthPolicy
from ....runtime.speculate.lengths.svip import entropy
from ....runtime.speculate.level import Level

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan

PLACES = 8.0
"""Tokens of a draft that the feature of the place counts as one."""

FEATURES = 3


@record
class DiscoLength(LengthRecord):
    """Go deeper while a classifier of the draft's prediction holds acceptance for likely enough.

    function: takes ``features`` f[B,T,3], of a drafted token the probability of the draft's best
    token, the entropy in nats and the place in the draft, from 1, over `PLACES`; returns ``odds``
    [B,T], the log odds that the target accepts it. threshold: least probability to go on with. For
    drafters that predict level by level with probabilities. trained: whether it knows anything.
    """

    function: Filled[str] = "disco"
    threshold: Inside = 0.5
    trained: Filled[bool] = False
    kind: ClassVar[str] = "disco"
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "drafts"})
    by_level: ClassVar[bool] = True
    judges: ClassVar[bool] = True

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield self.function, {"odds": ("", "")}


@LENGTHS.register(DiscoLength)
class DiscoPolicy(LengthPolicy):
    """Asks the classifier once a level, about each sequence's likeliest path. See the module
    docstring."""

    record: DiscoLength

    def __init__(self, record: DiscoLength, executable: Executable, batch: int) -> None:
        super().__init__(record, executable, batch)
        given = executable.program.function(record.function).input("features")
        self.dtype = type_of(given).dtype

    def goes_on(self, level: Level, depth: int) -> Flags:
        best = np.exp(level.scores[:, 0, 0])
        place = np.full(len(best), depth / PLACES)
        seen = np.stack([best, entropy(level), place], -1)[:, None].astype(np.float32)
        inputs = {"features": torch.from_numpy(seen).to(self.dtype)}
        odds = self.executable.run(self.record.function, inputs, ("odds",))["odds"]
        likely = odds[:, 0].float().sigmoid().cpu().numpy()
        flags: Flags = (likely >= self.record.threshold) & (level.tokens[:, 0, 0] >= 0)
        return flags
