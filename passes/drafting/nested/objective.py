"""Sorted fine-tuning: every depth of a nested draft learns what follows, through the same head.

Source: Kavehzadeh et al., "Sorted LLaMA: Unlocking the Potential of Intermediate Layers of Large
Language Models for Dynamic Inference" (2023), whose loss is the mean of the sub-models'
cross entropies; "S2D" (2024) trains drafts by it.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from . import NestedDraft


@objective(NestedDraft)
def sorted_loss(record: NestedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: of the whole draft."""
    every = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    every = every.expand(len(batch.tokens), -1)
    given = {"tokens": batch.tokens}
    total = torch.zeros((), device=batch.tokens.device)
    for function in record.functions:
        made = run(function, **given)[record.state]
        given = {"positions": every, record.state: made}
        student = run(record.head, select=every, **{record.state: made})["draft_logits"]
        total = total + distilled(student, batch.target(record.aim), 0)
    return Loss(total / len(record.functions), [hit_rate(student, batch.best, 0)])
