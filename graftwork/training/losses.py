"""The loss of all that is trained together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ir.plan import DecodePlan, Record
from .net import Net
from .objectives.base import Batch, Loss, objective_of
from .teacher_cache import CHOSEN, CachedWindows, Teacher


def total_loss(
    net: Net,
    teacher: Teacher,
    drafts: Sequence[Record],
    plan: DecodePlan,
    windows: CachedWindows,
    counted: torch.Tensor | None = None,
) -> Loss:
    """The sum of drafters' losses on windows with cached activations. counted: see `Batch`."""
    taps = {name: windows.states[name] for name in teacher.taps}
    run = net.sharing({name: windows.states[name] for name in teacher.shared})
    firsts, parts = windows.firsts.tolist(), plan.step.parts
    losses, said = [], {}
    for draft in drafts:
        known = net.known_of(draft)
        mark = None if known is None else known.data_ptr()
        if mark not in said:
            logits = teacher.logits(windows.states, known)
            said[mark] = Batch(
                windows.tokens,
                taps,
                logits,
                plan.draft,
                firsts,
                parts,
                known,
                windows.states[CHOSEN],
                counted,
            )
        losses.append(objective_of(draft)(draft, run, said[mark]))
    return joined(losses)


def joined(losses: Sequence[Loss]) -> Loss:
    """The sum of losses, and all their hits."""
    total = torch.stack([loss.total for loss in losses]).sum()
    return Loss(total, [hit for loss in losses for hit in loss.hits])
