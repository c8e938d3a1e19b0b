"""Sequential heads, run on the text's tokens: level k predicts the token k + 2 positions later.

Source: Ankner et al., "Hydra" (2024): cross entropy to the text, and in Hydra++ to the teacher's
distribution; weights decay^k.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...ir.plan import RecurrentDraft
from .base import Batch, Loss, Run, distilled, hit_rate, mean_loss, objective


@objective(RecurrentDraft)
def recurrent_loss(record: RecurrentDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    if record.entry is not None:
        # The entry attends to the text; the heads read one position.
        states = run(record.entry, tokens=batch.tokens, hidden=batch.hidden["hidden"])
        batch = replace(batch, hidden={"hidden": states["hidden"]})
    return mean_loss((one, _window_loss(record, run, one)) for one in batch.alone())


def _window_loss(record: RecurrentDraft, run: Run, batch: Batch) -> Loss:
    functions, state = record.functions, batch.hidden["hidden"]
    target = batch.target(record.aim)
    total, hits = torch.zeros(()), []
    for level in range(record.levels):
        # One position less per level: the last states have no next token.
        state = state[:, :-1]
        tokens = batch.tokens[:, 1 + level :]
        outputs = run(functions[min(level, len(functions) - 1)], tokens=tokens, state=state)
        student, state = outputs["draft_logits"], outputs["state"]
        total = total + record.decay**level * distilled(student, target, 1 + level)
        hits.append(hit_rate(student, batch.best, 1 + level))
    return Loss(total, hits)
