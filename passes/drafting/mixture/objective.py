"""Layers over a memory of the target learn from what the target's own head reads, in blocks.

Source: Zimmer et al., "Mixture of Attentions For Speculative Decoding" (2025): SmoothL1 to the
target's last state, and to the one before its last layers where the draft runs through them, half
each; and the divergence of the tokens' distributions. All places of a text are learned at once: a
text is cut into blocks, whose length is drawn for each text, so that a token sees the memory of
what precedes its block, up to that length before it (T-step bounded).
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ..glide import rows_seen
from . import MixtureDraft


@objective(MixtureDraft)
def mixture_loss(record: MixtureDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring. A text's first token has nothing before it, and does not count.
    hits: by place in a block of the first text."""
    assert record.entry is not None and record.near is not None
    tokens = batch.tokens
    places = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    memory = run(record.entry, positions=places)
    sizes = [block_of(text, record) for text in tokens]
    seen = torch.stack([rows_seen(tokens.shape[1], size) for size in sizes]).to(tokens.device)
    made = run(record.function, tokens=tokens, seen=seen, **memory)
    student = made["draft_logits"][:, 1:]
    wanted, best = batch.target(record.aim)[:, 1:], batch.best[:, 1:]
    distance = _distance(made["feature"], batch.hidden[record.near])
    if record.before is not None:
        distance = (distance + _distance(made["before"], batch.hidden[record.before])) / 2
    total = record.feature * distance + record.token * distilled(student, wanted, 0)
    levels = [slice(level, None, sizes[0]) for level in range(min(record.levels, sizes[0]))]
    return Loss(total, [hit_rate(student[:, some], best[:, some], 0) for some in levels])


def block_of(text: torch.Tensor, record: MixtureDraft) -> int:
    """The length of the blocks of a text i64[T], drawn by it, so that training repeats itself."""
    generator = torch.Generator().manual_seed(int(text.sum()))
    return int(torch.randint(record.block, record.longest + 1, (), generator=generator))


def _distance(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """SmoothL1 of states [N,T,H], but of the first."""
    return torch.nn.functional.smooth_l1_loss(made[:, 1:].float(), wanted[:, 1:].float())
