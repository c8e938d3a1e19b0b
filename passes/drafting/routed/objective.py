"""A head that says from a prompt's last state how often drafter and target will agree.

Source: Damani et al., "Learning How Hard to Think" (2024), which learns the probability that a
reward model prefers the strong model's answer. Here what is learned is the share of the answer's
tokens at which the drafter says what the target says, so no reward model is needed: every token of
a text ends a prompt, and the answer is the text behind it, up to `AHEAD` tokens. The loss is the
cross entropy of that share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ....training.objectives.acceptance import agreements
from ....training.objectives.base import Batch, Loss, Run, objective
from . import Routed

AHEAD = 64
"""Tokens of an answer that count at most."""

LEAST = 8
"""Tokens of an answer at least: the share of fewer says little."""


@objective(Routed)
def routed_loss(record: Routed, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: how often the head sends a prompt where its answer says."""
    with torch.no_grad():
        agreed = agreements(batch.draft, run, batch, 1)[0]
        wanted = shares(agreed.float())
    odds = run(record.function, hidden=batch.hidden[record.output])["ease"].float()
    odds = odds[:, : wanted.shape[1]]
    right = (odds.detach().sigmoid() > record.threshold) == (wanted > record.threshold)
    return Loss(F.binary_cross_entropy_with_logits(odds, wanted), [float(right.float().mean())])


def shares(agreed: torch.Tensor) -> torch.Tensor:
    """Of the tokens behind each token, f32[N,T'], up to `AHEAD`, the share at which both agree; T'
    is T less `LEAST` - 1. agreed: f32[N,T], whether they do at the first of these.

    >>> shares(torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]]))
    tensor([[0.7778, 0.7500]])
    """
    width = agreed.shape[1]
    sums = F.pad(agreed.cumsum(1), (1, 0))
    first = torch.arange(max(width - LEAST + 1, 0), device=agreed.device)
    last = (first + AHEAD).clamp(max=width)
    return (sums[:, last] - sums[:, first]) / (last - first)
