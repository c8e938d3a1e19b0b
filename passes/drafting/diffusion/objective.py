"""Blocks of a text, partly masked: each mask learns the token of its own place.

Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models" (MDLM, 2024): at noise
t, uniform in (0, 1), each token is a mask with probability t, and the bound on the likelihood is
the masks' cross entropy weighted by -alpha_t' / (1 - alpha_t) = 1 / t. As Arriola et al. ("Block
Diffusion", 2025) have it, blocks are denoised behind the clean text before them, each at a noise of
its own, and the noises of a window are spread evenly. A draft begins as masks alone, so a part of
the blocks is fully masked.
"""

from __future__ import annotations

import torch

from ....ir import UnsupportedError
from ....training.objectives.base import Batch, Loss, Run, distilled, objective
from ..dflash.objective import anchors, seen
from . import DiffusionDraft

SHARE, WHOLE = 0.2, 0.5
"""Part of a text's places at which a block begins; part of the blocks that are all masks."""


@objective(DiffusionDraft)
def denoising_loss(record: DiffusionDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. hits: by place, of the blocks that are all masks. Errors:
    `UnsupportedError` for a draft that reads the text both ways."""
    if record.window:
        raise UnsupportedError(
            f"draft={record.brief} reads the text both ways and comes trained: there is nothing to "
            f"train; block_diffusion has layers that are"
        )
    text, size = batch.tokens, record.levels
    many, width = text.shape
    starts = anchors(text, size, SHARE)
    columns = starts.repeat_interleave(size) + torch.arange(size).repeat(len(starts))
    generator = torch.Generator().manual_seed(int(text.sum()))
    noise = noises(len(starts), generator)
    masked = torch.rand(many, len(starts), size, generator=generator) < noise[:, None]
    masks = masked.flatten(1).to(text.device)
    clean = text[:, columns.to(text.device)]
    inputs = {
        "positions": torch.cat([torch.arange(width), columns]),
        "select": width + torch.arange(len(columns)),
        "ancestors": seen(width, starts, size),
    }
    given = {n: v.to(text.device).expand(many, *v.shape) for n, v in inputs.items()}
    blocks = torch.where(masks, torch.full_like(clean, record.token), clean)
    student = run(record.function, tokens=torch.cat([text, blocks], 1), **given)["draft_logits"]
    # The target of a place stands in the column before it.
    before = columns.to(text.device) - 1
    weight = (masked / noise[:, None]).flatten(1).to(text.device)
    target = batch.target(record.aim)[:, before] * weight[..., None]
    right = (student[0].argmax(-1) == batch.best[0, before]).unflatten(0, (len(starts), size))
    hits = right[(noise == 1).to(text.device)].float().mean(0).tolist()
    return Loss(distilled(student, target, 0), hits)


def noises(count: int, generator: torch.Generator) -> torch.Tensor:
    """f32[N] in (0, 1]: of every `1 / WHOLE` blocks the first is all masks, and the others' are
    spread evenly over (0, 1), from a random place on, in a random order."""
    found = torch.ones(count)
    rest = torch.arange(count) % round(1 / WHOLE) != 0
    some = int(rest.sum())
    start = torch.rand((), generator=generator)
    spread = (torch.arange(some) + start) / max(some, 1)
    found[rest] = spread[torch.randperm(some, generator=generator)].clamp(min=1e-3)
    return found
