"""A cached drafter and heads that go on from its states, both at once.

Source: Xiao et al., "Clover-2" (2024): at every level the cross entropy against the target's
distribution, plus 10 times the SmoothL1 distance of the states from the target's own; levels
weighted decay^level. (Li et al., "Gumiho", 2025, weigh the two the same way; Amphista has the cross
entropy alone.) The distance is measured in units of the target's states, whose size differs from
model to model. A drafter that draws several levels is run on its own states, as it is when it
drafts, and the heads learn on the states that it leaves them. The features that go in get noise
where the record says so, as in EAGLE (Li et al., 2024).
"""

from __future__ import annotations

import torch

from ...ir.plan import ContinuedDraft
from .base import Batch, Functions, Loss, Run, distilled, hit_rate, objective, objective_of
from .eagle import noisy, rollout


@objective(ContinuedDraft)
def continued_loss(record: ContinuedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    first = record.first
    assert first.output is not None
    features = batch.hidden[first.output]
    given = features[:, :-1]
    if record.noise:
        given = noisy(given, batch.tokens)
    total, made, hits = torch.zeros((), device=features.device), [], []
    levels = rollout(first.function, run, batch.tokens, given, first.levels)
    for level, (student, states) in enumerate(levels):
        total = total + record.decay**level * distilled(student, batch.target, 1 + level)
        hits.append(hit_rate(student, batch.best, 1 + level))
        made.append(states)
    if len(made) < first.levels:  # a window too short for the heads
        return Loss(total, hits)

    def noting(function: Functions, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        results = run(function, **inputs)
        made.extend(results[name] for name in ("state",) if name in results)
        return results

    later = objective_of(record.then)(record.then, noting, _below(record, batch, made))
    total = total + record.decay**first.levels * later.total
    size = features.float().square().mean().sqrt()
    for level, states in enumerate(made):
        wanted = features[:, 1 + level :].float() / size
        near = torch.nn.functional.smooth_l1_loss(states.float() / size, wanted)
        total = total + record.feature * record.decay**level * near
    return Loss(total, [*hits, *later.hits])


def _below(record: ContinuedDraft, batch: Batch, made: list[torch.Tensor]) -> Batch:
    """What the heads go on from, where others have the target's states.

    made: by level, the state at place t that token t + 2 + level is chosen from.
    """
    steps = len(made)
    if not record.then.whole_path:
        # Place t has fed token t + steps: to the heads it is what the target's place there is.
        hidden = {"hidden": made[-1]}
        return Batch(batch.tokens[:, steps:], hidden, batch.logits[:, steps:])
    places = batch.tokens.shape[1] - 1 - steps
    paths = [batch.tokens[:, 2 + level : 2 + level + places] for level in range(steps)]
    states = torch.stack([one[:, :places] for one in made], 2)
    # What the first head says, the target says after a path's last token.
    logits = batch.logits[:, steps:]
    return Batch(torch.stack(paths, 2), {"hidden": states}, logits)
