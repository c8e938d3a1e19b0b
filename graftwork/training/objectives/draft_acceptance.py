"""A head on a draft's states that says whether the target accepts the token that the draft read.

Source: Huang et al., "SpecDec++" (2024), section 4.2: the draft says a token Y after every place of
a text X that the target wrote; the target accepts it with the chance a = min(1, p(Y) / q(Y)). The
draft then reads the text with 15 in 100 tokens replaced by what it had said there, and at those the
head learns -a log P - w (1 - a) log (1 - P), w = 6, because rejections are rare where a draft is
any good. The draft stays as it is.

Y is sampled from q, as in the paper, at every other place, and the draft's best token at those
between, of which greedy decoding keeps what is the target's best one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...ir import UnsupportedError
from ...ir.plan import CachedDraft, DraftAcceptanceLength
from .base import Batch, Loss, Run, objective

SHARE = 0.15
"""Tokens of a text that are the draft's."""

REJECTION = 6.0
"""Weight of a rejection beside an acceptance."""


@objective(DraftAcceptanceLength)
def draft_acceptance_loss(record: DraftAcceptanceLength, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: how often the head is right, a chance above one half being
    an acceptance, where the draft's tokens are."""
    draft = _model(batch)
    with torch.no_grad():
        said = run(draft.function, tokens=batch.tokens)["draft_logits"].float()
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    drafted, chance = drafts(said, batch, generator)
    some = torch.rand(batch.tokens.shape, generator=generator).to(drafted.device) < SHARE
    some[:, 0] = False  # nothing was said before it
    mixed = torch.where(some, drafted, batch.tokens)
    odds = run(draft.function, tokens=mixed)["draft_odds"].float()
    losses = rejection_loss(odds, chance)
    count = some.sum().clamp(min=1)
    right = ((odds > 0) == (chance > 0.5)) & some
    return Loss((losses * some).sum() / count, [float(right.sum() / count)])


def rejection_loss(odds: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Cross entropy of log odds against chances of acceptance, rejections weighted."""
    accepted, rejected = F.logsigmoid(odds), F.logsigmoid(-odds)
    return -(chance * accepted + REJECTION * (1 - chance) * rejected)


def drafts(
    said: torch.Tensor, batch: Batch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens i64[N,T], chances f32[N,T]): what the draft, whose logits are f32[N,T,V], would have
    at each place of the text, and how likely the target is to accept it there."""
    q = said.softmax(-1)
    noise = torch.rand(said.shape, generator=generator).to(said.device)
    # Gumbel's: the largest of log q + noise is a sample of q.
    sampled = (said - (-noise.clamp(min=1e-20).log()).log()).argmax(-1)
    best = said.argmax(-1)
    p_said, q_said = (d.gather(-1, sampled[..., None])[..., 0] for d in (batch.teacher, q))
    ratio = (p_said / q_said.clamp(min=1e-20)).clamp(max=1)
    same = (best == batch.best).float()
    greedy = torch.arange(said.shape[1], device=said.device) % 2 == 1
    tokens = torch.where(greedy, best, sampled)
    chance = torch.where(greedy, same, ratio)
    # What is said after token t is about token t + 1.
    return (
        torch.cat([batch.tokens[:, :1], tokens[:, :-1]], 1),
        torch.cat([torch.ones_like(chance[:, :1]), chance[:, :-1]], 1),
    )


def _model(batch: Batch) -> CachedDraft:
    """The model of the plan that drafts. Errors: `UnsupportedError` where none does."""
    for leaf in batch.draft.leaves:
        if isinstance(leaf, CachedDraft) and leaf.is_model:
            return leaf
    raise UnsupportedError(
        f"length=draft_acceptance learns what the target accepts of another model's drafts "
        f"(draft_model), and draft={batch.draft.brief} has none"
    )
