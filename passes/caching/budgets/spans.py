"""How far back each cache looks, by what attention of text loses without the rest.

A head that looks at what is near needs the same span in any text; one that looks everywhere needs a
part of the text. So a span is alpha + beta N for texts of N tokens. Which alpha and beta a cache
has is chosen for all of them at once: what they lose together on texts of two lengths is least, and
their rows in the longest texts are the budget on average. Source: Fu et al., "MoA: Mixture of
Sparse Attention for Automatic Large Language Model Compression" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....ir import Program
from ..cached_rows import Read, Written, read_of
from ..scores.window import window
from .base import budget_rule

BETAS = (0.0, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Parts of a text that a span may grow by."""


@budget_rule(score=window)
def spans(
    program: Program,
    caches: Sequence[Written],
    windows: torch.Tensor,
    *,
    budget: int,
    block: int,
    sinks: int,
    context: int,
) -> list[int]:
    """Rows of each cache in texts of `context` tokens, whole blocks, sinks and span together,
    `budget` on average at most.

    caches: of the step, one a head of keys; windows i64[N,T] of text.
    """
    lengths = (windows.shape[1] // 2, windows.shape[1])
    lost = torch.zeros(len(caches), len(lengths), windows.shape[1] + 1)
    for text in windows:
        for place, read in enumerate(read_of(program, caches, text)):
            for which, length in enumerate(lengths):
                lost[place, which] += beyond(read, length, sinks, windows.shape[1])
    least = sinks // block + 1
    most = (context - block) // block
    rows = torch.arange(least, most + 1) * block
    costs = torch.stack([_costs(own, rows - sinks, lengths, context) for own in lost])
    picked = cheapest(costs, len(caches) * (budget // block - least))
    return [int(rows[n]) for n in picked]


def beyond(read: Read, length: int, sinks: int, size: int) -> torch.Tensor:
    """What the queries of a text's last quarter would get from rows beyond a span, f32[size + 1] by
    span: attention times the length of values, summed over heads. Sinks are never beyond it.

    Of the first `length` tokens.
    """
    first = length - length // 4
    q, k, v = (x[0, :, :length].float() for x in (read.queries, read.keys, read.values))
    grouped = q.reshape(len(k), -1, length, q.shape[2])[:, :, first:]
    scores = torch.einsum("ghtd,gcd->ghtc", grouped, k) * read.options["scale"]
    if (cap := read.options.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    place = torch.arange(length)
    behind = place[first:, None] - place[None]
    weights = torch.softmax(scores.masked_fill(behind < 0, -1e30), dim=-1)
    given = (weights * v.norm(dim=-1)[:, None, None]).sum((0, 1))
    given = given.masked_fill((behind < 0) | (place < sinks), 0.0)
    by_distance = torch.zeros(size + 1).index_add(0, behind.clamp(min=0).flatten(), given.flatten())
    return by_distance.flip(0).cumsum(0).flip(0)


def _costs(
    lost: torch.Tensor, wanted: torch.Tensor, lengths: Sequence[int], longest: int
) -> torch.Tensor:
    """What a cache loses at least, by the spans that it has in the longest texts: whichever beta
    they come of. lost f32[lengths,spans], wanted i64[spans] -> f32[spans]."""
    found = []
    for beta in BETAS:
        alpha = wanted - beta * longest
        own = sum(
            of[(alpha + beta * length).round().long().clamp(0, length)]
            for of, length in zip(lost, lengths, strict=True)
        )
        assert isinstance(own, torch.Tensor)
        found.append(own.masked_fill(alpha < 0, float("inf")))
    return torch.stack(found).amin(0)


def cheapest(costs: torch.Tensor, most: int) -> list[int]:
    """One choice of each row of costs f32[N,K], whose numbers add up to `most` at most, so that
    their costs add up to as little as can be."""
    best = torch.zeros(most + 1)
    taken = []
    for own in costs:
        made = torch.full((len(own), most + 1), float("inf"))
        for number, cost in enumerate(own[: most + 1].tolist()):
            made[number, number:] = best[: most + 1 - number] + cost
        best, chosen = made.min(0)
        taken.append(chosen)
    left, picked = most, []
    for chosen in reversed(taken):
        picked.append(int(chosen[left]))
        left -= picked[-1]
    return picked[::-1]
