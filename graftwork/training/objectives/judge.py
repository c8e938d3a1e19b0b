"""A judge of draft tokens: trained to detect replaced tokens in text.

Source: Bachmann et al., "Judge Decoding" (2025), which trains on annotated answers. Here a quarter
of a text's tokens are replaced by others that the target finds likely (Clark et al., "ELECTRA",
2020). Original tokens are acceptable, replacements are not.
"""

from __future__ import annotations

import torch

from ...ir.plan import Judge
from .base import Batch, Loss, Run, objective

SHARE = 0.25
"""Share of replaced tokens."""

CANDIDATES = 8
"""Replacements are among this many of the target's most likely tokens."""


@objective(Judge)
def judge_loss(record: Judge, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: balanced accuracy of the head."""
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
    """Tokens i64[N,T] with some replaced, and which, bool[N,T]; seeded by the tokens, so that
    training is reproducible."""
    tokens = batch.tokens
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    shape = tokens.shape
    some = torch.rand(shape, generator=generator).to(tokens.device) < SHARE
    count = min(CANDIDATES, batch.logits.shape[-1])
    ranks = torch.randint(count, (*shape, 1), generator=generator).to(tokens.device)
    likely = batch.logits.topk(count).indices.gather(-1, ranks)[..., 0]
    # Logits after token t predict token t + 1.
    likely = torch.cat([tokens[:, :1], likely[:, :-1]], 1)
    replaced = some & (likely != tokens)
    return torch.where(replaced, likely, tokens), replaced
