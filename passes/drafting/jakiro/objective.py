"""A layer whose last call predicts two levels: both learn at once, from the target's own features.

Source: Huang et al., "Jakiro: Boosting Speculative Decoding with Decoupled Multi-Head via MoE"
(2025): what EAGLE minimises (Li et al., 2024), for the next feature and token, and half of it for
those a place on; noise on the features that go in.
"""

from __future__ import annotations

import torch

from ....ir.plan import HeadsDraft
from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ....training.objectives.eagle import TOKEN_SHARE, noisy
from . import AheadDraft


@objective(AheadDraft)
def ahead_loss(record: AheadDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    assert record.first.output is not None and isinstance(record.then, HeadsDraft)
    features = batch.hidden[record.first.output]
    given = noisy(features[:, :-1], batch.tokens) if record.noise else features[:, :-1]
    # Place t is fed token t + 1, and its states are to be the features there and a place on.
    made = run(record.first.function, tokens=batch.tokens[:, 1:], hidden=given)
    later = run(record.then.function, hidden=made["ahead"])["draft_logits"][:, :, 0]
    levels = (made["hidden"], made["draft_logits"]), (made["ahead"], later)
    total, hits = torch.zeros((), device=features.device), []
    for place, (states, student) in enumerate(levels, 1):
        wanted = features[:, place:].float()
        near = torch.nn.functional.smooth_l1_loss(states[:, : wanted.shape[1]].float(), wanted)
        loss = near + TOKEN_SHARE * distilled(student, batch.target(record.aim), place)
        total = total + (loss if place == 1 else record.later * loss)
        hits.append(hit_rate(student, batch.best, place))
    return Loss(total, hits)
