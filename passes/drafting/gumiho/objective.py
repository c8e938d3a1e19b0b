"""Heads that see how a draft came to where they go on learn as parallel heads do."""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, objective
from ....training.objectives.heads import window_loss
from . import JoinedHeadsDraft


@objective(JoinedHeadsDraft)
def joined_loss(record: JoinedHeadsDraft, run: Run, batch: Batch) -> Loss:
    """The same of heads that take the paths i64[N,P,S], too, that stand in the tokens' place."""
    return window_loss(record, run, batch, tokens=batch.tokens)
