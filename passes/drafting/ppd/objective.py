"""Prompt tokens: the k-th learns the teacher's distribution k places on, losses weighted decay^k.

Source: Chen et al., "Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference" (2024); S3D's mask tokens learn the text (Zhong and Bharadwaj, 2024). Prompt tokens
stand behind tokens of the text at random; each group sees the text before it and itself, as it will
when it rides along with a step.
"""

from __future__ import annotations

import torch

from ....training.objectives.base import Batch, Loss, Run, distilled, hit_rate, objective
from ..dflash.objective import seen
from ..s3d import MaskedSkippingDraft
from . import PromptDraft, RidingDraft


@objective(PromptDraft)
def prompts_loss(record: PromptDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    return places_loss(record, run, batch, None)


def places_loss(
    record: RidingDraft | MaskedSkippingDraft,
    run: Run,
    batch: Batch,
    functions: tuple[str, ...] | None,
) -> Loss:
    places = random_places(batch.tokens, record.prompts)
    vocabulary = batch.logits.shape[-1]
    riders = torch.arange(vocabulary, vocabulary + record.prompts)
    total, hits = torch.zeros((), device=batch.logits.device), []
    for level, student in enumerate(said_after(riders, places, run, batch, functions)):
        wanted = places.to(batch.tokens.device) + 1 + level
        total = total + record.decay**level * distilled(
            student, batch.target(record.aim)[:, wanted], 0
        )
        hits.append(hit_rate(student, batch.best[:, wanted], 0))
    return Loss(total, hits)


def said_after(
    riders: torch.Tensor,
    places: torch.Tensor,
    run: Run,
    batch: Batch,
    functions: tuple[str, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """What the step says after each of the ids `riders` i64[M], in a row behind each of the text's
    tokens at `places` i64[G]: logits f[N,G,V] of each rider. They see the text before them, and
    each other in order."""
    many, width = batch.tokens.shape
    count, groups = len(riders), len(places)
    behind = torch.arange(1, 1 + count).repeat(groups) + places.repeat_interleave(count)
    positions = torch.cat([torch.arange(width), behind]).to(batch.tokens)
    sees = seen(width, places + 1, count, causal=True).to(batch.tokens.device)
    columns = torch.arange(width, width + groups * count).to(batch.tokens)
    logits = run(
        functions,
        tokens=torch.cat(
            [batch.tokens, riders.repeat(groups).to(batch.tokens).expand(many, -1)], 1
        ),
        positions=positions.expand(many, -1),
        ancestors=sees.expand(many, -1, -1),
        select=columns.expand(many, -1),
    )["logits"]
    # Steps that do not choose tokens give the text's logits too.
    said: tuple[torch.Tensor, ...] = (
        logits[:, -len(columns) :].unflatten(1, (groups, count)).unbind(2)
    )
    return said


def random_places(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """i64[G] ascending: places of prompt tokens, one in `count`, drawn with the tokens as seed."""
    last = tokens.shape[1] - count
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    order = torch.randperm(last, generator=generator)
    return order[: max(1, last // count)].sort().values
