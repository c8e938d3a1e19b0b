"""A head that predicts acceptance of the plan's drafts.

Binary cross entropy at each level, given that earlier levels were accepted. Rejections and
acceptances have equal weights (see `draft_acceptance` for SpecDec++'s), so that predictions are
calibrated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...ir import UnsupportedError
from ...ir.plan import AcceptanceLength, CachedDraft, DraftRecord, HeadsDraft
from .base import Batch, Loss, Run, objective
from .eagle import rollout


@objective(AcceptanceLength)
def acceptance_loss(record: AcceptanceLength, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: the head's accuracy by level."""
    with torch.no_grad():
        agreed = agreements(batch.draft, run, batch, record.levels)
    odds = run(record.function, hidden=batch.hidden[record.output])["accepted"].float()
    total, hits = torch.zeros((), device=odds.device), []
    reached = torch.ones_like(agreed[0])
    for level, right in enumerate(agreed):
        width = right.shape[1]
        reached = reached[:, :width]
        score = odds[:, :width, level]
        losses = F.binary_cross_entropy_with_logits(score, right.float(), reduction="none")
        total = total + (losses * reached).sum() / reached.sum().clamp(min=1)
        correct = ((score > 0) == right) & reached
        hits.append(float(correct.sum() / reached.sum().clamp(min=1)))
        reached = reached & right
    return Loss(total, hits)


def agreements(draft: DraftRecord, run: Run, batch: Batch, levels: int) -> list[torch.Tensor]:
    """By level, bool[N,T']: whether the drafter that starts after token t + 1 of the text drafts
    the teacher's token."""
    draft = draft.unrolled.draft if draft.unrolled is not None else draft
    if isinstance(draft, HeadsDraft):
        logits = run(draft.function, hidden=batch.hidden["hidden"])["draft_logits"].argmax(-1)
        drafted = list(logits.unbind(2))[:levels]
        shifts = range(1, 1 + len(drafted))
        return [_same(one, batch.best, shift) for one, shift in zip(drafted, shifts, strict=True)]
    if isinstance(draft, CachedDraft) and draft.is_model:
        best = run(draft.function, tokens=batch.tokens)["draft_logits"].argmax(-1)
        one = best == batch.best
        return [one[:, shift:] for shift in range(1, 1 + min(levels, draft.levels))]
    if isinstance(draft, CachedDraft) and draft.stepwise and draft.output is not None:
        return _rolled_out(draft, run, batch, min(levels, draft.levels))
    raise UnsupportedError(
        f"acceptance is learned from drafts of parallel heads (draft_medusa), of models "
        f"(draft_model) and of layers on features (draft_eagle), not for draft={draft}"
    )


def _rolled_out(draft: CachedDraft, run: Run, batch: Batch, levels: int) -> list[torch.Tensor]:
    """`agreements` of a layer on features, which goes on from its own states."""
    assert draft.output is not None
    found: list[list[torch.Tensor]] = []
    # A window at a time: every level attends to all before it.
    for index in range(len(batch.tokens)):
        one = slice(index, index + 1)
        features = batch.hidden[draft.output][one, :-1]
        if draft.entry is not None:
            features = run(draft.entry, hidden=features)["hidden"]
        said = rollout(draft.function, run, batch.tokens[one], features, levels)
        found.append(
            [
                _same(logits.argmax(-1), batch.best[one], 1 + level)
                for level, (logits, *_) in enumerate(said)
            ]
        )
    return [torch.cat(level) for level in zip(*found, strict=True)]


def _same(drafted: torch.Tensor, best: torch.Tensor, shift: int) -> torch.Tensor:
    wanted = best[:, shift:]
    return drafted[:, : wanted.shape[1]] == wanted
