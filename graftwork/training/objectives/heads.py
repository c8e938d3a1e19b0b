"""Parallel heads: head k predicts the token k + 2 positions later, with weight decay^k.

Source: Cai et al., "Medusa" (2024): cross entropy on the text.
"""

from __future__ import annotations

import torch

from ...ir.plan import HeadsDraft
from .base import Batch, Loss, Run, distilled, hit_rate, mean_loss, objective


@objective(HeadsDraft)
def heads_loss(record: HeadsDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    return mean_loss((one, window_loss(record, run, one)) for one in batch.alone())


def window_loss(record: HeadsDraft, run: Run, batch: Batch, **more: torch.Tensor) -> Loss:
    """The loss of whole windows. more: further inputs of the function."""
    logits = run(record.function, hidden=batch.hidden["hidden"], **more)["draft_logits"]
    total, hits = torch.zeros(()), []
    for level, student in enumerate(logits.unbind(2)):
        # The state after token t predicts token t + 1; head k the one after t + 1 + k.
        shift = 1 + level
        total = total + record.decay**level * distilled(student, batch.target(record.aim), shift)
        hits.append(hit_rate(student, batch.best, shift))
    return Loss(total, hits)
