"""Heads and channels whose numbers are about as large (Chiang et al., Quamba2, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 50
"""Of moving centres, at most."""


def clustered(largest: Tensor, groups: int, heads: int, channels: int) -> Tensor:
    """For each number of x f32[H,V] the largest of its cluster: the heads of a group are clustered
    by their largest number, and the channels of a cluster of heads by theirs.

    largest: of each head and channel. groups: of heads that share keys. heads, channels: clusters.
    """
    found = torch.empty_like(largest)
    for group in torch.arange(len(largest)).chunk(groups):
        labels = clusters(largest[group].amax(1), heads)
        for label in labels.unique():
            mine = group[labels == label]
            sizes = largest[mine].amax(0)
            found[mine] = _largest_alike(sizes, clusters(sizes, channels))
    return found


def clusters(sizes: Tensor, count: int) -> Tensor:
    """To which of at most `count` clusters each of some sizes f32[N] belongs, i64[N]: to that whose
    centre is nearest, the centres being the means of their clusters. They begin where as many of
    the sorted sizes lie between each two."""
    places = torch.linspace(0, len(sizes) - 1, min(count, len(sizes))).round().long()
    centres = sizes.sort().values[places]
    labels = torch.zeros(len(sizes), dtype=torch.long)
    for _ in range(ROUNDS):
        labels = (sizes[:, None] - centres).abs().argmin(1)
        sums = torch.zeros_like(centres).index_add(0, labels, sizes)
        members = torch.bincount(labels, minlength=len(centres))
        moved = torch.where(members > 0, sums / members.clamp(min=1), centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return labels


def _largest_alike(sizes: Tensor, labels: Tensor) -> Tensor:
    """For each size f32[N] the largest of those with its label."""
    most = sizes.new_zeros(int(labels.max()) + 1).scatter_reduce(0, labels, sizes, "amax")
    return most[labels]
