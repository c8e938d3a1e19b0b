"""Heads of exits: each learns the target's distribution for the same token, from an earlier state.

Source: Valade, "Accelerating Large Language Model Inference with Self-Supervised Early Exits"
(2024): Kullback-Leibler divergence to the model's own distribution, no labels.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, mean_loss, objective
from . import HeadsDepth


@objective(HeadsDepth)
def exits_loss(record: HeadsDepth, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: by exit."""
    return mean_loss((one, _window_loss(record, run, one)) for one in batch.alone())


def _window_loss(record: HeadsDepth, run: Run, batch: Batch) -> Loss:
    every = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape).to(batch.tokens)
    total, hits = torch.zeros((), device=batch.tokens.device), []
    for head, output in zip(record.heads, record.outputs, strict=True):
        stream = batch.hidden[output][:, None]
        student = run(head, select=every, stream=stream)["logits"]
        total = total + distilled(student, batch.teacher, 0)
        hits.append(hit_rate(student, batch.best, 0))
    return Loss(total, hits)
