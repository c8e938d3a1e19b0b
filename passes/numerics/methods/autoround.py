"""AutoRound: which way each value is rounded, and how wide ranges are, learned by signed gradients.

A value w becomes q = round((w - offset) / scale + v), with v in -0.5..0.5 that decides near halves,
and the ends of a group's range are multiplied by shares in 0..1. All of these move against the sign
of the gradient of e H e^T, as if rounding were the identity; the rate falls from 1/steps to 0. It
begins with rounding to the nearest, and a row keeps the best that was seen.

Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of
LLMs" (2023).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized, pack
from ...engine.moments import Moments
from .base import Method, method, where_better


class Learned(NamedTuple):
    """shift: v of each value f32[N,G,group]. low, high: shares of the ends of ranges f32[N,G]."""

    shift: Tensor
    low: Tensor
    high: Tensor


class Rounded(NamedTuple):
    """steps: f32[N,G,group]. scale, offset: as they are stored, [N,G]. inside: where a value is
    within its range."""

    steps: Tensor
    scale: Tensor
    offset: Tensor | None
    inside: Tensor


@method
class AutoRound(Method):
    """steps: of the descent. The paper learns a block's weights together, from the block's output
    on each text; here a weight is learned by itself, from its product's squared error."""

    steps: Annotated[int, Field(ge=1, le=10000)] = 200

    name: ClassVar[str] = "autoround"

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Moments) -> Quantized:
        """A weight f32[N,K]; no row's loss is above rounding's."""
        grouped = weight.view(len(weight), -1, numeric.group)
        ones = torch.ones(grouped.shape[:2])
        learned = Learned(torch.zeros_like(grouped), ones, ones.clone())
        best, least = rounded(grouped, learned, numeric), torch.full(weight.shape[:1], torch.inf)
        for step in range(self.steps):
            made = rounded(grouped, learned, numeric)
            error = values(made, numeric).view_as(weight) - weight
            pull = error @ prepared.hessian
            now = (pull * error).sum(-1)
            best = where_better(now < least, made, best)
            least = torch.minimum(now, least)
            slopes = gradients(grouped, made, 2 * pull.view_as(grouped), numeric)
            rate = (1 - step / self.steps) / self.steps
            moved = [a - rate * b.sign() for a, b in zip(learned, slopes, strict=True)]
            learned = Learned(moved[0].clamp(-0.5, 0.5), *(m.clamp(0, 1) for m in moved[1:]))
        packed = pack(best.steps.flatten(1).to(torch.uint8), numeric.bits)
        return Quantized(packed, best.scale, best.offset)


def rounded(grouped: Tensor, learned: Learned, numeric: Numeric) -> Rounded:
    """Values f32[N,G,group] as what was learned rounds them."""
    ends = torch.stack([grouped.amin(-1) * learned.low, grouped.amax(-1) * learned.high], -1)
    if numeric.kind == "symmetric":  # one share of the larger end
        ends = (grouped.abs().amax(-1) * learned.high)[..., None]
    scale, offset = numeric.scales(ends)
    start = 0 if offset is None else offset.float()[..., None]
    middle = 2 ** (numeric.bits - 1) if offset is None else 0
    free = torch.round((grouped - start) / scale.float()[..., None] + learned.shift) + middle
    steps = free.clamp(0, 2**numeric.bits - 1)
    return Rounded(steps, scale, offset, free == steps)


def values(made: Rounded, numeric: Numeric) -> Tensor:
    """What rounded values stand for, f32[N,G,group]."""
    offset = None if made.offset is None else made.offset[..., None]
    return numeric.values(made.steps, made.scale[..., None], offset)


def gradients(grouped: Tensor, made: Rounded, pull: Tensor, numeric: Numeric) -> Learned:
    """The slopes of what is learned, of those of the rounded values `pull` f32[N,G,group]: rounding
    counts as the identity, and a value outside its range stays at its end."""
    scale = made.scale.float()[..., None]
    outside = pull * ~made.inside
    shift = pull * made.inside * scale
    if made.offset is None:
        middle, most = 2 ** (numeric.bits - 1), 2 ** (numeric.bits - 1) - 1
        by_scale = made.steps - middle - grouped / scale * made.inside
        high = (pull * by_scale).sum(-1) * grouped.abs().amax(-1) / most
        return Learned(shift, torch.zeros_like(high), high)
    moved = (grouped - made.offset.float()[..., None]) / scale
    by_scale = ((made.steps - moved * made.inside) * pull).sum(-1) / (2**numeric.bits - 1)
    low, high = grouped.amin(-1), grouped.amax(-1)
    return Learned(shift, (outside.sum(-1) - by_scale) * low, by_scale * high)
