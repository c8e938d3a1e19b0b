"""Mask tokens behind the first segment: each learns the token of its place, as PPD's prompts do."""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, objective
from ..ppd.objective import places_loss
from . import MaskedSkippingDraft


@objective(MaskedSkippingDraft)
def masks_loss(record: MaskedSkippingDraft, run: Run, batch: Batch) -> Loss:
    """The same of tokens that run through the segments that draft alone."""
    return places_loss(record, run, batch, record.functions)
