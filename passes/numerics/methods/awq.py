"""AWQ: channels that the text uses much are scaled up before rounding, and their inputs down.

A product's weight is multiplied by a factor a channel and what it reads divided by it (`folding`),
so that the program computes the same, and rounding errs less where it matters. With x the mean
|input| of a channel and w the mean of its |weights| as shares of their groups' largest, the factors
are x^r / w^(1-r), r from a grid, where the products' squared error on the text is least. Ranges of
groups are then shrunk where that makes it less.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(2023), whose factors are x^r; those with w are AutoAWQ's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized
from ...engine.blocks import source_of, weight_of
from ...engine.calibrate import Seen
from ...engine.moments import Moments, loss
from ..folding import Fold, Rows, factors_into, fold_of
from .base import Method, method

LEAST = 1e-4
"""A channel counts as so much of the largest at least."""

SHRINK = 0.5
"""Ranges are not shrunk further."""


@method
class Awq(Method):
    """grid: how many r are tried, from 0; factors of 1 are, too. clip: how many ranges are tried,
    from the whole one down to half of it.

    The error is that of the products that share an input, where the paper's code takes that of the
    whole attention or MLP behind them. Inputs that nothing can take the division of stay as they
    are (behind gelu).
    """

    grid: Annotated[int, Field(ge=1, le=1000)] = 20
    clip: Annotated[int, Field(ge=1, le=1000)] = 10

    name: ClassVar[str] = "awq"

    def balanced(
        self, seen: Seen, numerics: Mapping[str, Numeric], fixed: frozenset[str]
    ) -> dict[str, Tensor]:
        """Weights with factors in them."""
        made: dict[str, Tensor] = {}
        for tap, nodes in seen.products.items():
            fold, names = _fold(nodes, fixed), [weight_of(node) for node in nodes]
            if fold is None:
                continue
            weights = {name: made.get(name, seen.weights[name]).float() for name in names}
            factors = self.factors(
                [(weight, numerics[name]) for name, weight in weights.items()],
                seen.moments[tap],
                fold,
            )
            spread = fold.spread(factors)
            made |= {name: weight * spread for name, weight in weights.items()}
            for rows in fold.rows:
                before = made.get(rows.weight, seen.weights[rows.weight])
                made[rows.weight] = factors_into(before, rows, factors)
            _scale(seen.moments[tap], spread)
        return made

    def balanced_expert(
        self, gate_up: Tensor, down: Tensor, moments: Moments, numeric: Numeric
    ) -> tuple[Tensor, Tensor]:
        """Factors of what an expert's second product reads go into the rows of its up projection.
        What its first one reads, others read too: it stays as it is."""
        size = down.shape[1]
        up = Rows("", size, 2 * size)
        factors = self.factors([(down, numeric)], moments, Fold((up,)))
        _scale(moments, factors)
        return factors_into(gate_up, up, factors), down * factors

    def factors(
        self, weights: Sequence[tuple[Tensor, Numeric]], moments: Moments, fold: Fold
    ) -> Tensor:
        """The best factors of the grid, f32[K], or fewer where channels share them."""
        used = fold.pooled(moments.magnitude)
        used = used.clamp(min=max(float(used.max()) * LEAST, 1e-30))
        shares = [_shares(weight, numeric) for weight, numeric in weights]
        large = fold.pooled(torch.stack(shares).mean(0)).clamp(min=LEAST)
        tried = [torch.ones_like(used)]
        for r in (i / self.grid for i in range(self.grid)):
            factors = used**r / large ** (1 - r)
            tried.append(factors / (factors.max() * factors.min()).sqrt())
        losses = [_loss(weights, moments, fold.spread(factors)) for factors in tried]
        return tried[losses.index(min(losses))]

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Moments) -> Quantized:
        """Rounded to the nearest, in the best of ranges."""
        grouped = weight.view(len(weight), -1, numeric.group)
        most = grouped.abs().amax(-1, keepdim=True)
        corners = _corners(prepared.hessian, numeric.group)
        best, least = grouped, torch.full(most.shape[:2], torch.inf)
        for i in range(self.clip):
            limit = most * (1 - (1 - SHRINK) * i / self.clip)
            clipped = grouped.clamp(-limit, limit)
            error = grouped - _rounded(clipped.view_as(weight), numeric).view_as(grouped)
            pulled = torch.matmul(error.transpose(0, 1), corners).transpose(0, 1)
            now = (pulled * error).sum(-1)
            best = torch.where((now < least)[..., None], clipped, best)
            least = torch.minimum(now, least)
        return numeric.quantize(best.reshape(weight.shape))


def _fold(nodes: Sequence[torch.fx.Node], fixed: frozenset[str]) -> Fold | None:
    """Where factors go; None if something else reads the products' input, or what is fixed."""
    source = source_of(nodes[0])
    fold = fold_of(source) if set(source.users) == set(nodes) else None
    if fold is None:
        return None
    touched = {rows.weight for rows in fold.rows} | set(fold.states)
    return None if touched & fixed else fold


def _scale(moments: Moments, factors: Tensor) -> None:
    """Make them those of values divided by factors f32[K]."""
    moments.hessian.div_(torch.outer(factors, factors))
    moments.magnitude.div_(factors)


def _shares(weight: Tensor, numeric: Numeric) -> Tensor:
    """The mean of each column's |values| as shares of their groups' largest, f32[K]."""
    grouped = weight.abs().view(len(weight), -1, numeric.group)
    return (grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-30)).mean(0).flatten()


def _loss(weights: Sequence[tuple[Tensor, Numeric]], moments: Moments, spread: Tensor) -> float:
    """The products' squared error on the text with factors f32[K]."""
    total = 0.0
    for weight, numeric in weights:
        error = weight - _rounded(weight * spread, numeric) / spread
        total += float(loss(error, moments.hessian).sum())
    return total


def _rounded(weight: Tensor, numeric: Numeric) -> Tensor:
    return numeric.dequantize(numeric.quantize(weight))


def _corners(hessian: Tensor, size: int) -> Tensor:
    """The blocks f32[K/size,size,size] along the diagonal."""
    starts = range(0, len(hessian), size)
    return torch.stack([hessian[i : i + size, i : i + size] for i in starts])
