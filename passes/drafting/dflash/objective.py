"""Blocks of mask tokens: each mask learns the token of its own place.

Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026): blocks begin
at places drawn from the text; a block sees the features of what precedes its first token, and all
of itself; the k-th mask's loss weighs exp(-(k - 1) / gamma), since nothing is accepted behind an
error.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from . import BlockDraft


@objective(BlockDraft)
def block_loss(record: BlockDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    text, size = batch.tokens, 1 + record.levels
    many, width = text.shape
    starts = anchors(text, record.levels, record.anchors)
    places = starts.repeat_interleave(size) + torch.arange(size).repeat(len(starts))
    features = batch.hidden[record.output or ""]
    if record.entry is not None:
        features = run(record.entry, hidden=features)["hidden"]
    blank = features.new_zeros(many, len(places), features.shape[-1])
    firsts = text[:, starts.to(text.device)]
    masks = firsts.new_full((many, len(starts), record.levels), record.token)
    blocks = torch.cat([firsts[..., None], masks], -1).flatten(1)
    inputs = {
        "positions": torch.cat([torch.arange(width), places]),
        "select": width + torch.arange(len(places)),
        "ancestors": seen(width, starts, size),
    }
    given = {n: v.to(text.device).expand(many, *v.shape) for n, v in inputs.items()}
    outputs = run(
        record.function,
        tokens=torch.cat([text.new_full(text.shape, record.blank), blocks], 1),
        hidden=torch.cat([features, blank], 1),
        **given,
    )
    student = outputs["draft_logits"].unflatten(1, (len(starts), size))
    total, hits = torch.zeros((), device=student.device), []
    weights = [record.decay**level for level in range(record.levels)]
    for level, weight in enumerate(weights):
        mine, wanted = student[:, :, 1 + level], starts.to(text.device) + level
        total = total + weight / sum(weights) * distilled(
            mine, batch.target(record.aim)[:, wanted], 0
        )
        hits.append(hit_rate(mine, batch.best[:, wanted], 0))
    return Loss(total, hits)


def anchors(tokens: torch.Tensor, levels: int, share: float) -> torch.Tensor:
    """i64[A], ascending: the places at which blocks begin, drawn by the text, so that training
    repeats itself. A block's last place is within the text, and one place precedes its first."""
    most = tokens.shape[1] - levels
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    count = max(1, round(share * most))
    return (1 + torch.randperm(max(1, most - 1), generator=generator)[:count]).sort().values


def seen(width: int, starts: torch.Tensor, size: int, *, causal: bool = False) -> torch.Tensor:
    """bool[W+A*N,W+A*N], which columns each column sees: of the text, what precedes it; of a block,
    the text before its start and the whole block, or what precedes it there if causal."""
    block = torch.ones(size, size).tril() if causal else torch.ones(size, size)
    text = torch.ones(width, width, dtype=torch.bool).tril()
    before = torch.arange(width) < starts.repeat_interleave(size)[:, None]
    own = torch.block_diag(*[block] * len(starts)).bool()
    beside = torch.zeros(width, len(own), dtype=torch.bool)
    return torch.cat([torch.cat([text, beside], 1), torch.cat([before, own], 1)])
