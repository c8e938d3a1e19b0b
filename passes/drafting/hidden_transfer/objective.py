"""Pseudo states learn what the target says after the later true ones.

Source: Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language Model
Acceleration" (2024): the divergence of the distribution after a pseudo state from that after the
true state of its place, all of the same weight. Which places there are, and what they see, is as of
prompt tokens.
"""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, objective
from ..ppd.objective import places_loss
from . import TransferDraft


@objective(TransferDraft)
def transfer_loss(record: TransferDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    return places_loss(record, run, batch, None)
