"""Lexical units in the text: [PAD] tokens in their place learn to say them.

    loss = -mean over (s, k) within units of log p(x[s + 2 + k] | x[..s], [PAD] * (k + 1)),  k >= 0

A lexical unit is a row of tokens each of which the target, asked token by token, gives more than
`unit`. Where x[s + 1], ..., x[s + 2 + k] are of one unit, the k-th [PAD] behind x[s] learns the
unit's token; one that stands beyond counts `beyond`. Source: Sun et al., "Decoding at the Speed of
Thought: Harnessing Parallel Decoding of Lexical Units for LLMs" (2024).
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ..ppd.objective import random_places, said_after
from . import LexicalDraft


@objective(LexicalDraft)
def lexical_loss(record: LexicalDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. decay: the k-th [PAD] counts decay^k."""
    count, vocabulary = record.prompts, batch.logits.shape[-1]
    inside = within(chances(batch), record.unit, count)
    places = unit_places(batch.tokens, inside)
    riders = torch.full((count,), vocabulary)
    at = places.to(batch.tokens.device)
    weights = torch.where(inside[:, at], 1.0, record.beyond)
    total, hits = torch.zeros((), device=batch.logits.device), []
    for level, student in enumerate(said_after(riders, places, run, batch)):
        wanted = batch.target(record.aim)[:, at + 1 + level]
        # The mean is over all places: those that do not count have no target.
        loss = distilled(student, wanted * weights[..., level, None], 0)
        total = total + record.decay**level * loss * weights[..., level].numel()
        hits.append(hit_rate(student, batch.best[:, at + 1 + level], 0))
    return Loss(total / weights.sum().clamp(min=1.0), hits)


def chances(batch: Batch) -> torch.Tensor:
    """f32[N,T]: the probability that the teacher gives the token after each; after the last one,
    its best."""
    after = torch.cat([batch.tokens[:, 1:], batch.best[:, -1:]], 1)
    scores = batch.logits.float()
    return (scores.gather(-1, after[..., None])[..., 0] - scores.logsumexp(-1)).exp()


def within(chances: torch.Tensor, unit: float, count: int) -> torch.Tensor:
    """bool[N,T,count]: whether the k-th [PAD] behind each token stands in the place of a token of
    the unit that begins with the next token. chances: f32[N,T], of the token after each.

    >>> within(torch.tensor([[0.9, 0.8, 0.2, 0.9, 0.9, 0.9]]), 0.5, 2)[0].int().tolist()
    [[1, 0], [0, 0], [0, 0], [1, 1], [1, 0], [0, 0]]
    """
    sure = torch.nn.functional.pad(chances > unit, (0, count))
    rows = sure.unfold(1, count + 1, 1).cumprod(-1).bool()
    return rows[..., 1:]


def unit_places(tokens: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """i64[G] ascending: as many places as `random_places` draws, those first where most texts have
    a unit. inside: bool[N,T,count]."""
    count = inside.shape[-1]
    many = len(random_places(tokens, count))
    last = tokens.shape[1] - count
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    order = torch.randperm(last, generator=generator)
    texts = inside[:, :last, 0].sum(0).cpu()
    chosen = order[(-texts[order]).argsort(stable=True)][:many]
    return chosen.sort().values
