"""A classifier of a draft model's predictions: does the target accept the token?

Source: Mamou et al., "Dynamic Speculation Lookahead" (DISCO, 2024): binary cross entropy on drafts
that were made and verified along texts. The draft is frozen.

Along a text the draft predicts every token, and the target says which are right. Places in a draft
follow from that: a draft begins behind a rejected token, and behind one of the target's own after
`levels` accepted ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....ir import UnsupportedError
from ....ir.plan import CachedDraft
from ....training.objectives.base import Batch, Loss, Run, objective
from . import PLACES, DiscoLength


@objective(DiscoLength)
def disco_loss(record: DiscoLength, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: the classifier's accuracy."""
    draft = _model(batch)
    with torch.no_grad():
        logits = run(draft.function, tokens=batch.tokens)["draft_logits"].float()
        accepted = logits.argmax(-1) == batch.best
        places = places_in_drafts(accepted, draft.levels)
        features = features_of(logits, places)
    odds = run(record.function, features=features)["odds"].float()
    drafted = places > 0
    losses = F.binary_cross_entropy_with_logits(odds, accepted.float(), reduction="none")
    count = drafted.sum().clamp(min=1)
    right = ((odds > 0) == accepted) & drafted
    return Loss((losses * drafted).sum() / count, [float(right.sum() / count)])


def places_in_drafts(accepted: torch.Tensor, levels: int) -> torch.Tensor:
    """i64[N,T], the place from 1 of each position's token in the draft that it belongs to; 0 for a
    token that the target adds to a whole draft. accepted: bool[N,T].

    >>> places_in_drafts(torch.tensor([[True, False, True, True, True, True]]), 2).tolist()
    [[1, 2, 1, 2, 0, 1]]
    """
    places = torch.zeros(accepted.shape, dtype=torch.int64, device=accepted.device)
    place = torch.zeros_like(places[:, 0])
    going = torch.zeros_like(accepted[:, 0])
    for column in range(accepted.shape[1]):
        whole = going & (place == levels)
        place = torch.where(whole, 0, torch.where(going, place + 1, 1))
        places[:, column] = place
        going = accepted[:, column] & ~whole
    return places


def features_of(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`DiscoLength`'s features f32[N,T,3] of logits f32[N,T,V] at places i64[N,T] of drafts."""
    found = []
    for row in logits:  # a window at a time: distributions are large
        scores = row.log_softmax(-1)
        entropy = -(scores.exp() * scores.clamp(min=-1e4)).sum(-1)
        found.append(torch.stack([scores.amax(-1).exp(), entropy], -1))
    return torch.cat([torch.stack(found), places[..., None] / PLACES], -1)


def _model(batch: Batch) -> CachedDraft:
    """The plan's draft model. Errors: `UnsupportedError` if there is none."""
    for leaf in batch.draft.leaves:
        if isinstance(leaf, CachedDraft) and leaf.is_model:
            return leaf
    raise UnsupportedError(
        f"length=disco is trained for drafts of another model (draft_model), and "
        f"draft={batch.draft.brief} has none"
    )
