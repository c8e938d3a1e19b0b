"""A cached drafter and heads that continue from its states, trained together.

Sources: Xiao et al., "Clover-2" (2024): at every level cross entropy against the target's
distribution plus 10 times SmoothL1 between the inputs of its head and of the target's; levels
weighted 0.7^level, no noise. Li et al., "Gumiho" (2025): the same distance plus 0.1 times cross
entropy; heads weighted 0.8^level / 9; noise on input features as in EAGLE (Li et al., 2024). Li et
al., "Amphista" (2024): cross entropy alone. A drafter of several levels runs on its own states, as
in decoding, and the heads are trained on these.
"""

from __future__ import annotations

import torch

from ...ir.plan import ContinuedDraft, HeadsDraft, RecurrentDraft
from .base import Batch, Functions, Loss, Run, distilled, hit_rate, objective, objective_of
from .eagle import noisy, rollout


@objective(ContinuedDraft)
def continued_loss(record: ContinuedDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    first = record.first
    assert first.output is not None
    given = batch.hidden[first.output][:, :-1]
    if record.noise:
        given = noisy(given, batch.tokens)
    total, made, hits = torch.zeros((), device=given.device), [], []
    levels = rollout(first.function, run, batch.tokens, given, first.levels)
    for level, (student, states, read) in enumerate(levels):
        near = record.token * distilled(student, batch.target(record.aim), 1 + level)
        near = near + _distance(record, batch, read, 1 + level)
        total = total + record.decay**level * near
        hits.append(hit_rate(student, batch.best, 1 + level))
        made.append(states)
    if len(made) < first.levels:  # a window too short for the heads
        return Loss(total, hits)
    features: list[torch.Tensor] = []

    def noting(function: Functions, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        results = run(function, **inputs)
        if record.feature:
            read = results["feature"]
            features.extend(read.unbind(2) if read.dim() == 4 else [read])
        return results

    then = record.then
    assert isinstance(then, HeadsDraft | RecurrentDraft)
    later = objective_of(then)(then, noting, _below(record, batch, made))
    total = total + record.later * record.token * later.total
    for level, read in enumerate(features):
        weight = record.later * then.decay**level
        total = total + weight * _distance(record, batch, read, 1 + first.levels + level)
    return Loss(total, [*hits, *later.hits])


def _distance(record: ContinuedDraft, batch: Batch, read: torch.Tensor, shift: int) -> torch.Tensor:
    """Distance of a head's input f[N,T',H] and that of the target's, `shift` positions later."""
    if not record.feature:
        return read.new_zeros((), dtype=torch.float32)
    wanted = batch.hidden[record.near or record.first.output or ""][:, shift:]
    near = torch.nn.functional.smooth_l1_loss(read[:, : wanted.shape[1]].float(), wanted.float())
    return record.feature * near


def _below(record: ContinuedDraft, batch: Batch, made: list[torch.Tensor]) -> Batch:
    """The heads' batch, with the drafter's states in the place of the target's. made: by level, the
    states that predict token t + 2 + level at position t."""
    steps = len(made)
    later = slice(None), slice(steps, None)
    if not record.then.whole_path:
        # Position t has read token t + steps; for the heads it is the target's position there.
        hidden = {"hidden": made[-1]}
        return batch.part(later, batch.tokens[:, steps:], hidden)
    places = batch.tokens.shape[1] - 1 - steps
    paths = [batch.tokens[:, 2 + level : 2 + level + places] for level in range(steps)]
    states = torch.stack([one[:, :places] for one in made], 2)
    # The first head predicts what the target predicts after a path's last token.
    return batch.part(later, torch.stack(paths, 2), {"hidden": states})
