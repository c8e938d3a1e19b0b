"""Features of queries and keys by which rows that a cache drops are weighed, learned on text.

Each layer learns by itself: from the queries, keys and values of text, so that attention over the
rows that are kept, and what the others add up to, comes near attention over all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ir.ops.dropped import positive_features
from .cached_rows import Read

RATE = 3e-3
EVERY = 4
"""Of so many tokens one is learned from."""
FAR, NEAR = 30.0, 3.0
"""Bounds of logarithms: rows that weigh less than e^-FAR weigh so much, and the missing ones begin
with e^NEAR times the others at most."""


class Features(NamedTuple):
    """Layers of `positive_features`: of queries [H,D,I] and [H,I,R], of keys [G,D,I], [G,I,R] and
    [G,R,R]."""

    query_inner: Tensor
    query_outer: Tensor
    key_inner: Tensor
    key_outer: Tensor
    key_last: Tensor


class Learned(NamedTuple):
    """error: of attention, squared, over what dropping rows without a trace gives."""

    features: Features
    error: float


class _Lesson(NamedTuple):
    """Of one text: queries [H,N,D] of the tokens for which rows are missing, keys [G,T,D], values
    [G,T,E], which rows these lack bool[G,N,T]; kept: what they find in the others [H,N,E] and how
    much that weighs [H,N], as a logarithm; share: how much the missing rows do, over that [H,N];
    whole: what attention over all gives [H,N,E]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gone: Tensor
    kept: Tensor
    weight: Tensor
    share: Tensor
    whole: Tensor


def learned(
    reads: Sequence[Read], *, budget: int, block: int, rank: int, inner: int, steps: int, seed: int
) -> Learned:
    """Features of a layer. reads: what its attention reads of texts longer than a full cache."""
    lessons = [_lesson(read, budget, block) for read in reads]
    with torch.enable_grad():
        features = _first(lessons[0], rank, inner, seed)
        best, least = features, _error(features, lessons)
        turning = [weights.requires_grad_() for weights in features]
        optimizer = torch.optim.Adam(turning, lr=RATE)
        for step in range(steps):
            optimizer.zero_grad()
            loss = _loss(features, lessons[step % len(lessons)])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(turning, 1.0)
            optimizer.step()
            if (step + 1) % max(steps // 10, 1) == 0 and (now := _error(features, lessons)) < least:
                best, least = Features(*(weights.detach().clone() for weights in features)), now
    return Learned(Features(*(weights.detach() for weights in best)), least)


def _lesson(read: Read, budget: int, block: int) -> _Lesson:
    """What a text teaches. Rows are dropped as the paper's policy has it, where a block ends: all
    but the latest, and those that got most attention so far, half of the budget each."""
    queries, keys, values = (x[0].float() for x in (read.queries, read.keys, read.values))
    (heads, length, dim), groups = queries.shape, len(keys)
    scores = queries.reshape(groups, -1, dim) @ keys.transpose(1, 2) * read.options["scale"]
    if (cap := read.options.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.reshape(groups, heads // groups, length, length)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    full, recent = budget + block, budget // 2
    gone = torch.zeros(groups, length, length, dtype=torch.bool)
    for end in range(full, length, block):
        got = weights[:, :, :end, :end].mean(1).sum(1)
        got[:, end - recent :] = float("inf")
        lost = torch.ones_like(got).scatter(1, got.topk(budget).indices, 0.0).bool()
        gone[:, end : end + block, :end] = lost[:, None]
    whole = (weights @ values[:, None])[:, :, full::EVERY]
    left = scores.masked_fill(gone[:, None], float("-inf"))[:, :, full::EVERY]
    kept = left.softmax(-1) @ values[:, None]
    flat = heads, left.shape[2]
    weight = left.logsumexp(-1).clamp(min=-FAR)
    lost = scores.masked_fill(~gone[:, None], float("-inf"))[:, :, full::EVERY].logsumexp(-1)
    return _Lesson(
        queries[:, full::EVERY],
        keys,
        values,
        gone[:, full::EVERY],
        kept.reshape(*flat, -1),
        weight.reshape(flat),
        (lost - weight).clamp(max=NEAR).exp().reshape(flat),
        whole.reshape(*flat, -1),
    )


def _first(lesson: _Lesson, rank: int, inner: int, seed: int) -> Features:
    """Random layers; rows then weigh as much as they should, on average."""
    made = torch.Generator().manual_seed(seed)
    heads, groups, dim = len(lesson.queries), len(lesson.keys), lesson.keys.shape[2]

    def layer(*dims: int) -> Tensor:
        return torch.randn(dims, generator=made) / math.sqrt(dims[1])

    features = Features(
        layer(heads, dim, inner),
        layer(heads, inner, rank),
        layer(groups, dim, inner),
        layer(groups, inner, rank),
        layer(groups, rank, rank),
    )
    ones = lesson._replace(values=torch.ones_like(lesson.values[..., :1]))
    found = _dropped(features, ones)[..., 0].mean()
    wanted = lesson.share.mean()
    return features._replace(key_last=features.key_last * (wanted / found.clamp(min=1e-20)))


def _dropped(features: Features, lesson: _Lesson) -> Tensor:
    """What dropped rows' values add up to [H,N,E], over the weight of the others."""
    asked = positive_features(lesson.queries[None], *features[:2])[0]
    held = positive_features(lesson.keys[None], *features[2:])[0]
    (heads, count, rank), groups = asked.shape, len(held)
    weights = asked.reshape(groups, -1, rank) @ held.transpose(1, 2)
    weights = weights.reshape(groups, -1, *lesson.gone.shape[1:]) * lesson.gone[:, None]
    found = (weights @ lesson.values[:, None]).reshape(heads, count, -1)
    over: Tensor = found * (-lesson.weight).exp()[..., None]
    return over


def _loss(features: Features, lesson: _Lesson) -> Tensor:
    ones = torch.ones_like(lesson.values[..., :1])
    found = _dropped(features, lesson._replace(values=torch.cat([lesson.values, ones], -1)))
    merged = (lesson.kept + found[..., :-1]) / (1 + found[..., -1:])
    before = (lesson.kept - lesson.whole).pow(2).mean().clamp(min=1e-20)
    left: Tensor = (merged - lesson.whole).pow(2).mean() / before
    return left


def _error(features: Features, lessons: Sequence[_Lesson]) -> float:
    with torch.no_grad():
        return sum(float(_loss(features, lesson)) for lesson in lessons) / len(lessons)
