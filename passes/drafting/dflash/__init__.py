"""Layers over a cache of the target's features that predict a block in one call.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import record
from ....ir.plan.bounds import Filled, Part, Place
from ....runtime.speculate.level import Ids
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.setting import Setting
from ..parallel import OneCallDraft, OneCallProposer


@record
@dataclass(frozen=True)
class BlockDraft(OneCallDraft):
    """Layers over a cache of the target's features that predict a block (DFlash).

    The function is fed the text's last token and the id `token` once for each of the `levels` that
    it drafts, which all see each other; what it says after the k-th is about that very place. Their
    rows are forgotten. Rows of the text are made of ``hidden`` alone, beside the id `blank`.
    anchors: in training, the part of a text's places at which a block begins.
    """

    blank: Filled[Place] = 0
    anchors: Part = 0.2
    kind: ClassVar[str] = "block"

    @property
    def mutual(self) -> tuple[str, ...]:
        return (self.function,)


@PROPOSERS.register(BlockDraft)
class BlockProposer(OneCallProposer):
    """Feeds the text's last token and mask tokens; level d is what was said of mask token d."""

    record: BlockDraft
    mutual = True

    def __init__(self, record: BlockDraft, setting: Setting) -> None:
        self.blank, self.ahead = record.blank, 1 + record.levels
        super().__init__(record, setting)

    def riders(self) -> Ids:
        last = np.array([text[-1:] for text in self.committed.texts], dtype=np.int64)
        return np.pad(last, ((0, 0), (0, self.record.levels)), constant_values=self.record.token)
