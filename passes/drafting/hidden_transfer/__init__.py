"""States of tokens to come, made of a token's state within the target, predict the places ahead.

Source: Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import record
from ....ir.plan.bounds import Filled
from ....runtime.speculate.proposers.base import PROPOSERS
from ..ppd import PromptProposer, RidingDraft


@record
@dataclass(frozen=True)
class TransferDraft(RidingDraft):
    """Pseudo states behind the nodes of a draft, which predict the places ahead (Hidden Transfer).

    The step overwrites the riders' states with linear maps of the node's. maps: their names, each
    f[H,H].
    """

    maps: Filled[tuple[str, ...]] = ()
    kind: ClassVar[str] = "transfer"

    @property
    def weights(self) -> set[str]:
        return set(self.maps)


@PROPOSERS.register(TransferDraft)
class TransferProposer(PromptProposer):
    """As of prompt tokens."""
