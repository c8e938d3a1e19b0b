"""A cached drafter and heads that go on from its states, both at once.

Source: Xiao et al., "Clover" (2024): at every level the cross entropy against the target's
distribution, plus 10 times the SmoothL1 distance of the states from the target's own; levels
weighted decay^level. The distance is measured in units of the target's states, whose size differs
from model to model. The states that go in get noise, as in EAGLE (Li et al., 2024).
"""

from __future__ import annotations

import torch

from ...ir.plan import CachedDraft, ContinuedDraft
from .base import Batch, Loss, Run, distilled, hit_rate, objective, objective_of
from .eagle import noisy


@objective(ContinuedDraft)
def continued_loss(record: ContinuedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    first = record.first
    assert isinstance(first, CachedDraft) and first.output is not None
    features = batch.hidden[first.output]
    given = noisy(features[:, :-1], batch.tokens)
    outputs = run(first.function, tokens=batch.tokens[:, 1:], hidden=given)
    made = [outputs["hidden"]]

    def noting(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        results = run(function, **inputs)
        made.extend(results[name] for name in ("state",) if name in results)
        return results

    # Place t has fed token t + 1: to the heads it is what the target's place t + 1 is to others.
    seen = Batch(batch.tokens[:, 1:], {"hidden": made[0]}, batch.logits[:, 1:])
    later = objective_of(record.then)(record.then, noting, seen)
    student = outputs["draft_logits"]
    total = distilled(student, batch.target, 1) + record.decay * later.total
    size = features.float().square().mean().sqrt()
    for level, states in enumerate(made):
        wanted = features[:, 1 + level :].float() / size
        near = torch.nn.functional.smooth_l1_loss(states.float() / size, wanted)
        total = total + record.feature * record.decay**level * near
    return Loss(total, [hit_rate(student, batch.best, 1), *later.hits])
