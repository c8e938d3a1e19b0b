"""How many rows each of a layer's caches keeps, by what attention of text looks at.

The rows that a layer's last queries look at most are chosen among all of its heads at once: where a
head looks at few rows it needs few, and another may keep more. Source: Feng et al., "Ada-KV:
Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...ir import Program, arguments, run
from ...ir.rewrite.cleanup import sweep
from ..engine.feed import empty_inputs
from .cached_rows import Written

G = torch.ops.graftwork
FLOOR = 0.2
"""What every head keeps of the rows that it would be given evenly."""
POOL = 5
"""Rows that a score is averaged over, as snapkv does."""


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
    sinks, recent: rows that every cache keeps in any case.
    """
    layers: dict[int | None, list[int]] = {}
    for place, cache in enumerate(caches):
        layers.setdefault(program.states[cache.names[0]].layer, []).append(place)
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
        weights = G.row_attention(
            queries, read.keys, past, block=recent, last=recent, **read.options
        )
        ranked = G.row_scores_attention(weights, past, pool=POOL, recent=recent)
        made.append(ranked[0].amax(0)[sinks : len(window) - recent])
    return made


class Read(NamedTuple):
    """What attention over a cache reads of a text: queries f[1,H,T,D], keys f[1,G,T,D], values
    f[1,G,T,E], and its scale and softcap."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    options: dict[str, Any]


def read_of(program: Program, caches: Sequence[Written], window: torch.Tensor) -> Iterator[Read]:
    """What each of the step's caches is read with, when a text i64[T] is fed."""
    whole = caches[0].function
    fn = whole.copy()
    copies = dict(zip(whole, fn, strict=True))
    asked = [arguments(copies[cache.attend]) for cache in caches]
    read = ("q", "k", "k_steps", "v", "v_steps")
    fn.set_outputs({f"{r}.{n}": g[r] for n, g in enumerate(asked) for r in read if r in g})
    sweep(fn)  # nothing else is written: states may have no rows for so long a text
    watched = program.with_function(fn)
    found = run(watched, fn.name, empty_inputs(watched, fn.name, window[None]))
    for n, (cache, given) in enumerate(zip(caches, asked, strict=True)):
        keys, values = (
            G.stored_rows(found[f"{r}.{n}"], found[f"{r}_steps.{n}"], **cache.how)
            if cache.how
            else found[f"{r}.{n}"]
            for r in "kv"
        )
        options = {o: given[o] for o in ("scale", "softcap") if given[o] is not None}
        yield Read(found[f"q.{n}"], keys, values, options)
