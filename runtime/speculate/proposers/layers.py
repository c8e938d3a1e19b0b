"""Proposers that draft with some of the target's own layers, over its own caches."""

from __future__ import annotations

from typing import Any

import torch

from ..level import Level
from ..setting import Setting
from .base import Proposer


class LayersProposer(Proposer):
    """Nothing is kept of committed text: the target's caches hold it.

    feeder: runs the target. texts: the generation's. below: levels of the draft so far.
    """

    below = 0

    def __init__(self, record: Any, setting: Setting) -> None:
        super().__init__(record, setting)
        assert setting.feeder is not None, "drafting with the target's layers needs its feeder"
        self.feeder, self.texts = setting.feeder, setting.texts

    def ends(self) -> tuple[list[int], list[int]]:
        """Row and position at which the draft's next level begins, by text; 0 for done ones."""
        past = [0 if text.done else text.rows + self.below for text in self.texts]
        starts = [0 if text.done else text.position + self.below for text in self.texts]
        return past, starts


def best_of(logits: torch.Tensor, count: int) -> Level:
    """The candidates of logits f32[B,M,V], which nothing may write to any more."""
    best = logits.log_softmax(-1).topk(count)
    return Level(best.indices.numpy(), best.values.numpy(), logits.numpy())
