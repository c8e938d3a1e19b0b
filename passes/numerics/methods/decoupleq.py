"""decoupleQ: integers and their scales as two problems, solved in turns.

A row w is to become s_g * q + z_g in each group g, so that e H e^T of what is left is least. With
q fixed that is a least-squares problem in s and z with a closed form; with s and z fixed it is
rounding, for which GPTQ's feedback is used. A row is changed only where that makes its loss less.

Source: Guo et al., "decoupleQ: Towards 2-bit Post-Training Uniform Quantization via decoupling
Parameters into Integer and Floating Points" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized, levels
from ...engine.moments import Moments, loss
from .base import Method, method, where_better
from .feedback import Prepared, inverse_factor, round_with_feedback, scales_of, solved

ELEMENTS = 2**24
"""Of the normal equations that are solved at once."""


@method
class DecoupleQ(Method):
    """damp: as in GPTQ. rounds: how often scales and integers are solved for in turns.

    It starts from what GPTQ gives. The paper's second stage, which tunes scales and norms of a
    block together, is not done.
    """

    damp: Annotated[float, Field(gt=0, le=1)] = 0.01
    rounds: Annotated[int, Field(ge=1, le=100)] = 4

    name: ClassVar[str] = "decoupleq"

    def prepared(self, moments: Moments) -> Prepared:
        """Errors: as `inverse_factor`."""
        hessian = moments.hessian.clone()
        factor = inverse_factor(moments, self.damp)
        diagonal = hessian.diagonal()
        diagonal[factor.dead] = 1
        diagonal += self.damp * diagonal.mean()
        return Prepared(hessian, factor)

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Prepared) -> Quantized:
        """A weight f32[N,K]; its loss falls from round to round, row by row."""
        hessian, factor = prepared
        weight[:, factor.dead] = 0
        best = round_with_feedback(weight, factor, numeric)
        least = loss(weight - numeric.dequantize(best), hessian)

        def keep(found: Quantized) -> None:
            nonlocal best, least
            now = loss(weight - numeric.dequantize(found), hessian)
            better = now < least  # not where it is NaN
            best = where_better(better, found, best)
            least = torch.where(better, now, least)

        for _ in range(self.rounds):
            before = least
            keep(rescaled(weight, best, numeric, hessian))
            keep(round_with_feedback(weight, factor, numeric, scales_of(best, numeric.group)))
            if torch.equal(before, least):
                break
        return best


def rescaled(weight: Tensor, best: Quantized, numeric: Numeric, hessian: Tensor) -> Quantized:
    """The best scales and offsets for the same integers. weight: f32[N,K]; hessian: f32[K,K]."""
    values = levels(best.weight, best.offset, None, bits=numeric.bits)
    error = weight - numeric.dequantize(best)
    groups = weight.shape[1] // numeric.group
    parts = [values] if best.offset is None else [values, torch.ones_like(values)]
    rows = max(1, ELEMENTS // (groups * len(parts)) ** 2)
    pieces = zip(error.split(rows), *(part.split(rows) for part in parts), strict=True)
    moves = torch.cat([_moves(e, features, groups, hessian) for e, *features in pieces])
    moved = best.scale.double() + moves[:, 0]
    scale = numeric.stored(torch.where(moved > 0, moved, best.scale))
    if best.offset is None:
        return Quantized(best.weight, scale)
    return Quantized(best.weight, scale, numeric.stored(best.offset.double() + moves[:, 1]))


def _moves(error: Tensor, features: Sequence[Tensor], groups: int, hessian: Tensor) -> Tensor:
    """What to add to the scales (and offsets) of each group, f64[N,len(features),groups], so that
    errors f32[N,K] become least: the normal equations of features f32[N,K] within groups.

    They are solved for the change, so that where integers leave it open nothing changes.
    """
    rows, columns = error.shape
    size = columns // groups
    matrix = error.new_empty(rows, len(features), groups, len(features), groups)
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        for i, feature in enumerate(features):
            pulled = feature[:, part] @ hessian[part]
            for j, other in enumerate(features):
                matrix[:, i, group, j] = (pulled * other).view(rows, groups, size).sum(-1)
    pull = error @ hessian
    wanted = torch.stack([(pull * f).view(rows, groups, size).sum(-1) for f in features], 1)
    count = len(features) * groups
    flat = matrix.double().view(rows, count, count)
    return solved(flat, wanted.double().view(rows, count)).view(rows, len(features), groups)
