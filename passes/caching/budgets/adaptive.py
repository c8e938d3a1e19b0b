"""How many rows each of a layer's caches keeps, by what attention of text looks at.

The rows that a layer's last queries look at most are chosen among all of its heads at once: where a
head looks at few rows it needs few, and another may keep more. Source: Feng et al., "Ada-KV:
Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ir import PassError, Program
from ..cached_rows import Written, read_of
from ..scores.snapkv import snapkv
from .base import budget_rule

FLOOR = 0.2
"""What every head keeps of the rows that it would be given evenly."""


@budget_rule(score=snapkv)
def adaptive(
    program: Program,
    caches: Sequence[Written],
    windows: torch.Tensor,
    *,
    budget: int,
    block: int,
    sinks: int,
    recent: int,
) -> list[int]:
    """Rows of each cache, whole blocks, `budget` on average in each layer but for rounding.

    caches: of the step, with the queries of each; windows i64[N,T] of text, T more than the budget.
    sinks, recent: rows that every cache keeps in any case. Errors: `PassError` where each layer has
    one cache.
    """
    layers: dict[int | None, list[int]] = {}
    for place, cache in enumerate(caches):
        layers.setdefault(program.states[cache.names[0]].layer, []).append(place)
    if len(layers) == len(caches):
        raise PassError(
            f"evict_cache: layers='adaptive' shares the rows of a layer out between its heads, and "
            f"layers of {program.name} have one head of keys and values each: there is nothing to "
            f"share out between heads. The recipe snapkv with evict_cache.heads=shared keeps the "
            f"same rows; with split_heads.heads=own each head of queries has rows of its own"
        )
    always, least = sinks + recent, (sinks + recent) // block * block + block
    counts = torch.zeros(len(caches))
    for window in windows:
        scores = _scores(program, caches, window, sinks, recent)
        for places in layers.values():
            own = torch.stack([scores[place] for place in places])
            counts[places] += chosen(own, budget - always) / len(windows)
    rows = (counts + always).tolist()
    return [max(round(count / block) * block, least) for count in rows]


def chosen(scores: torch.Tensor, budget: int) -> torch.Tensor:
    """How many rows of each head are kept, f32[heads], `budget` on average: of each its best to a
    fifth of that, and then the best of all. scores f32[heads,rows]."""
    ranked = scores.sort(dim=1, descending=True).values
    safe = int(FLOOR * budget)
    ranked[:, :safe] = float("inf")
    best = ranked.flatten().topk(min(budget * len(scores), ranked.numel())).indices
    return torch.bincount(best // scores.shape[1], minlength=len(scores)).float()


def _scores(
    program: Program, caches: Sequence[Written], window: torch.Tensor, sinks: int, recent: int
) -> list[torch.Tensor]:
    """Of each cache, f32[rows], the attention of the last `recent` queries, but for those rows that
    are kept in any case."""
    past = torch.tensor([len(window)])
    made = []
    for read in read_of(program, caches, window):
        queries = read.queries[:, :, -recent:]
        how = {"block": recent, "recent": recent, "attention": read.options}
        ranked = snapkv.function(queries, read.keys, past, **how)
        made.append(ranked[0].amax(0)[sinks : len(window) - recent])
    return made
