"""Routers of layers: the tokens with the highest scores run through, and the text must bear it.

Sources: Raposo et al., "Mixture-of-Depths" (2024), for the tokens of a window with the highest
scores, and for the second objective, by which a score says by itself whether it is among them;
Zhang et al., "p-MoD" (2024), for how many there are. The target stays as it is, so what a layer
changes is not scaled by the score, as it is where both are trained: the gradient goes through the
choice as if it had been (a straight-through estimate).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ..cut_depth import STREAM
from . import MixtureDepth


@objective(MixtureDepth)
def routers_loss(record: MixtureDepth, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: how often the routed model says the whole one's token."""
    every = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape).to(batch.tokens)
    shares = dict(zip(record.routed, record.shares, strict=True))
    *segments, head = batch.parts
    made: dict[str, torch.Tensor] = {}
    causal = torch.zeros((), device=batch.tokens.device)
    for place, part in enumerate(segments):
        before = made
        given = {"positions": every, STREAM: before[STREAM]} if place else {"tokens": batch.tokens}
        made = run(part, **given)
        if place in shares:
            score, passed = before[record.score], before[STREAM]
            kept = chosen(score, shares[place])
            gate = kept + score - score.detach()
            made[STREAM] = passed + gate[:, None, :, None] * (made[STREAM] - passed)
            causal = causal + F.binary_cross_entropy(score, kept)
    logits = run(head, select=every, **{STREAM: made[STREAM]})["logits"]
    total = distilled(logits, batch.teacher, 0) + causal / len(shares)
    return Loss(total, [hit_rate(logits, batch.best, 0)])


def chosen(score: torch.Tensor, share: float) -> torch.Tensor:
    """1 for the share of the tokens of f[N,T] with the highest scores, 0 for the others.

    >>> chosen(torch.tensor([[0.1, 0.9, 0.5, 0.2]]), 0.5)
    tensor([[0., 1., 1., 0.]])
    """
    count = max(1, round(share * score.shape[1]))
    return torch.zeros_like(score).scatter_(1, score.detach().topk(count, 1).indices, 1.0)
