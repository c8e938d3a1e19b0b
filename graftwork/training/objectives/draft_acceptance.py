"""A head on a draft model's states that predicts whether the target accepts the token it read.

Source: Huang et al., "SpecDec++" (2024), section 4.2. The draft predicts a token Y at every
position of a text by the target, which accepts it with probability a = min(1, p(Y) / q(Y)). The
draft then reads the text with 15% of its tokens replaced by Y; there the head's loss is
-a log P - w (1 - a) log (1 - P), with w = 6 because rejections are rare. The draft is frozen.

As in the paper Y is sampled from q, but only at every other position; at the others it is the
draft's best token, which greedy decoding accepts if it is the target's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...ir import UnsupportedError
from ...ir.plan import CachedDraft, DraftAcceptanceLength
from .base import Batch, Loss, Run, objective

SHARE = 0.15
"""Share of a text's tokens replaced by the draft's."""

REJECTION = 6.0
"""Weight of a rejection relative to an acceptance."""


@objective(DraftAcceptanceLength)
def draft_acceptance_loss(record: DraftAcceptanceLength, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: the head's accuracy at replaced tokens; a probability above
    0.5 is an acceptance."""
    draft = _model(batch)
    with torch.no_grad():
        logits = run(draft.function, tokens=batch.tokens)["draft_logits"].float()
    generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
    drafted, chance = drafts(logits, batch, generator)
    some = torch.rand(batch.tokens.shape, generator=generator).to(drafted.device) < SHARE
    some[:, 0] = False  # the first token has no prediction
    mixed = torch.where(some, drafted, batch.tokens)
    odds = run(draft.function, tokens=mixed)["draft_odds"].float()
    losses = rejection_loss(odds, chance)
    count = some.sum().clamp(min=1)
    right = ((odds > 0) == (chance > 0.5)) & some
    return Loss((losses * some).sum() / count, [float(right.sum() / count)])


def rejection_loss(odds: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """Weighted cross entropy of log odds against probabilities of acceptance."""
    accepted, rejected = F.logsigmoid(odds), F.logsigmoid(-odds)
    return -(chance * accepted + REJECTION * (1 - chance) * rejected)


def drafts(
    logits: torch.Tensor, batch: Batch, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens i64[N,T], probabilities f32[N,T]): tokens of the draft with logits f32[N,T,V] at each
    position of the text, and probabilities that the target accepts them."""
    q = logits.softmax(-1)
    noise = torch.rand(logits.shape, generator=generator).to(logits.device)
    # Gumbel-max: the argmax of log q + noise is a sample of q.
    sampled = (logits - (-noise.clamp(min=1e-20).log()).log()).argmax(-1)
    best = logits.argmax(-1)
    p_of, q_of = (d.gather(-1, sampled[..., None])[..., 0] for d in (batch.teacher, q))
    ratio = (p_of / q_of.clamp(min=1e-20)).clamp(max=1)
    same = (best == batch.best).float()
    greedy = torch.arange(logits.shape[1], device=logits.device) % 2 == 1
    tokens = torch.where(greedy, best, sampled)
    chance = torch.where(greedy, same, ratio)
    # Logits after token t predict token t + 1.
    return (
        torch.cat([batch.tokens[:, :1], tokens[:, :-1]], 1),
        torch.cat([torch.ones_like(chance[:, :1]), chance[:, :-1]], 1),
    )


def _model(batch: Batch) -> CachedDraft:
    """The plan's draft model. Errors: `UnsupportedError` if there is none."""
    for leaf in batch.draft.leaves:
        if isinstance(leaf, CachedDraft) and leaf.is_model:
            return leaf
    raise UnsupportedError(
        f"length=draft_acceptance is trained for drafts of another model (draft_model), and "
        f"draft={batch.draft.brief} has none"
    )
