"""A layer that asks the target's states of the text what follows each three tokens.

Source: Zeng et al., "Chimera: A Lossless Decoding Method for Accelerating Large Language Models
Inference by Fusing all Tokens" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ir import InputError
from ....ir.plan import CachedDraft, DecodePlan, record
from ....ir.plan.base import Returned
from ....ir.plan.bounds import Filled, Share
from ....ir.plan.draft import candidates
from ....runtime.speculate.level import Level
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.cached import CachedProposer


@record
@dataclass(frozen=True)
class ChimeraDraft(CachedDraft):
    """A function with a cache that makes states, and a head for each level that reads them.

    function: besides what it takes of `CachedDraft` it takes ``before`` [B,T,2], the two tokens
    before each; it returns ``hidden`` [B,T,H], what stands in for the target's state at the place
    of each token, and ``joined`` [B,T,2*H], that behind the state beside the token. heads: one a
    level; each takes, as ``hidden`` [B,T,2*H], the target's last state and, behind it, what the
    function made of a node. decay: as in `CachedDraft`. hard: the part of the loss of tokens that
    the text's own tokens have.
    """

    heads: Filled[tuple[str, ...]] = ()
    hard: Share = 0.5
    kind: ClassVar[str] = "chimera"
    unrolls: ClassVar[bool] = False

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        if len(self.heads) != self.levels:
            raise InputError(
                f"{self.brief} names {len(self.heads)} heads: expected one for each of its "
                f"{self.levels} levels"
            )
        yield self.function, {"hidden": ("", "", ""), "joined": ("", "", "")}
        for head in self.heads:
            yield head, candidates()


@PROPOSERS.register(ChimeraDraft)
class ChimeraProposer(CachedProposer):
    """As any layer with a cache; what its states say is asked of each level's head.

    last: the target's last states [B,1,H]. level: of the nodes that were fed last.
    """

    record: ChimeraDraft
    last: torch.Tensor

    def root(self, count: int) -> Level:
        self.level = 0
        return super().root(count)

    def _level(self, outputs: Mapping[str, torch.Tensor], count: int) -> Level:
        made, told = outputs["hidden"], outputs["joined"]
        size = made.shape[-1]
        if not self.level:
            self.last = told[..., :size]
        told = torch.cat([self.last.expand(-1, made.shape[1], -1), told[..., size:]], -1)
        head = self.record.heads[self.level]
        fetch = tuple(self.executable.program.function(head).outputs)
        said = self.executable.run(head, {"hidden": told}, fetch)
        self.level += 1
        return super()._level({**said, "hidden": made}, count)
