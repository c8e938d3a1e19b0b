"""A judge of draft tokens: it learns to tell what a text says from what it might have said.

Source: Bachmann et al., "Judge Decoding" (2025), whose judge learns from answers that were marked.
Here a mark costs nothing: in text, every fourth token is replaced by another one that the target
finds likely there (Clark et al., "ELECTRA", 2020). The text's own tokens are acceptable, whether or
not they are the target's first choice, and the replacements are not.
"""

from __future__ import annotations

import torch

from ...ir.plan import Judge
from .base import Batch, Loss, Run, objective

SHARE = 0.25
"""Tokens that are replaced."""

CANDIDATES = 8
"""Of the target's likeliest tokens a replacement is one."""


@objective(Judge)
def judge_loss(record: Judge, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: how often the head is right, replaced tokens and others
    weighing the same."""
    tokens, replaced = substituted(batch)
    with torch.no_grad():
        hidden = run(None, tokens=tokens)[record.output]
    odds = run(record.function, hidden=hidden)["judged"][:, 1:, 0].float()
    wanted, counts = ~replaced[:, 1:], replaced[:, 1:].sum().clamp(min=1)
    # Both kinds weigh the same, however many there are.
    weight = torch.where(wanted, 0.5 / (wanted.sum().clamp(min=1)), 0.5 / counts)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(
        odds, wanted.float(), reduction="none"
    )
    right = ((odds > 0) == wanted).float()
    return Loss((losses * weight).sum(), [float((right * weight).sum())])


def substituted(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens i64[N,T] with some replaced, and which, bool[N,T]; the text decides, so that training
    repeats itself."""
    tokens = batch.tokens
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    shape = tokens.shape
    some = torch.rand(shape, generator=generator).to(tokens.device) < SHARE
    count = min(CANDIDATES, batch.logits.shape[-1])
    ranks = torch.randint(count, (*shape, 1), generator=generator).to(tokens.device)
    likely = batch.logits.topk(count).indices.gather(-1, ranks)[..., 0]
    # What the target says after token t is about token t + 1.
    likely = torch.cat([tokens[:, :1], likely[:, :-1]], 1)
    replaced = some & (likely != tokens)
    return torch.where(replaced, likely, tokens), replaced
