"""Mask tokens in a draft's call: the k-th learns the token k places further on.

Sources: An et al., "PARD" (2025): the draft learns its next token at every place of a text and,
from mask tokens behind a place, those after that. Of the places that one level has, the next keeps
the part `keep` and no others, but never fewer than the part `least` of all places (conditional
drop-token), so that many levels cost little; all that is left weighs the same. A mask token sees
the text up to its place, and the mask tokens before it of the same place. "P-EAGLE" (2026) does the
same with EAGLE-3's layer.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from . import ParallelDraft


@objective(ParallelDraft)
def parallel_loss(record: ParallelDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    # The feature after token t goes in beside token t + 1 and tells of the one after that.
    shift = 0 if record.output is None else 1
    text = batch.tokens[:, shift:]
    many, width = text.shape
    starts, depths = columns(batch.tokens, width, record)
    inputs = {"positions": starts + depths, "select": torch.arange(len(starts))}
    inputs["ancestors"] = seen(starts, depths)
    given = {n: v.to(text.device).expand(many, *v.shape) for n, v in inputs.items()}
    masks = text.new_full((many, len(starts) - width), record.token)
    if record.output is not None:
        features = batch.hidden[record.output][:, :-1]
        if record.entry is not None:
            features = run(record.entry, hidden=features)["hidden"]
        blank = features.new_zeros(many, masks.shape[1], features.shape[-1])
        given["hidden"] = torch.cat([features, blank], 1)
    outputs = run(record.function, tokens=torch.cat([text, masks], 1), **given)
    student = outputs["draft_logits"]
    target = batch.target(record.aim)
    total, hits = torch.zeros((), device=student.device), []
    for depth in range(record.levels):
        mine = (depths == depth).nonzero()[:, 0].to(text.device)
        wanted = starts.to(text.device)[mine] + depth + shift
        share = len(mine) / len(starts)
        total = total + share * distilled(student[:, mine], target[:, wanted], 0)
        hits.append(hit_rate(student[:, mine], batch.best[:, wanted], 0))
    return Loss(total, hits)


def columns(
    tokens: torch.Tensor, width: int, record: ParallelDraft
) -> tuple[torch.Tensor, torch.Tensor]:
    """(starts i64[W], depths i64[W]): the text's `width` columns, of depth 0, then by level those
    of mask tokens, each behind a place of the text. Which places a level keeps follows from the
    tokens, so that training repeats itself."""
    last = max(1, width - record.masks)
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    order = torch.randperm(last, generator=generator)
    parts = [max(record.keep**level, record.least) for level in range(1, record.levels)]
    kept = [order[: max(1, round(last * part))].sort().values for part in parts]
    starts = torch.cat([torch.arange(width), *kept])
    sizes = torch.tensor([width, *map(len, kept)])
    return starts, torch.arange(record.levels).repeat_interleave(sizes)


def seen(starts: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
    """Which columns each column continues, bool[W,W]."""
    text = depths == 0
    before = text & (starts <= starts[:, None])
    same = ~text & (starts == starts[:, None]) & (depths <= depths[:, None])
    return before | same
