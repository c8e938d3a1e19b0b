"""A predictor of how many tokens of a draft the target accepts.

Source: Zhang et al., "AdaEAGLE" (2024). Along a text the plan's drafter says what it would draft
behind each token, and the teacher how much of that it accepts, `levels` at most. The loss is
smooth L1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....training.objectives.acceptance import agreements
from ....training.objectives.base import Batch, Loss, Run, objective
from . import PredictedLength


@objective(PredictedLength)
def length_loss(record: PredictedLength, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: how often the nearest whole number is right."""
    with torch.no_grad():
        wanted = accepted_lengths(agreements(batch.draft, run, batch, record.levels))
    said = run(record.function, hidden=batch.hidden[record.output])["length"].float()
    said = said[:, : wanted.shape[1]]
    right = (said.detach().round() == wanted).float()
    return Loss(F.smooth_l1_loss(said, wanted), [float(right.mean())])


def accepted_lengths(agreed: list[torch.Tensor]) -> torch.Tensor:
    """Tokens that are accepted, f32[N,T'], of drafts whose levels agree bool[N,>=T'] each."""
    width = agreed[-1].shape[1]
    whole = torch.stack([level[:, :width] for level in agreed]).float()
    return whole.cumprod(0).sum(0)
