"""Scales and offsets by least squares: with them the stored values are nearest to the weight.

Of a group x of a row, rounded to whole numbers q with some scale s and offset o, the best scale and
offset for these q solve a 2 x 2 system: the error sum_k u_k (x_k - s q_k - o)^2 is least. With them
x is rounded anew, a few times; neither turn makes the error larger. u_k is 1 without a text, and
with one the mean square of what channel k of the product reads: the diagonal of the second
derivatives that GPTQ has. Without offsets o is 0, and q counts from the middle.

Source: the importance matrix and scales that it weighs are llama.cpp's ("k-quants", 2023); turns of
rounding and fitting are Lloyd, "Least squares quantization in PCM" (1982).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized, pack
from ...engine.moments import Moments
from .base import Method, method, where_better

AT_ONCE = 1 << 16
"""Values that go through all turns at a time, so that they stay in a core's own cache."""

LEAST = 1e-4
"""A channel counts as so much of the mean at least, so that the text's zeros are not ignored."""


class Fitted(NamedTuple):
    """Scales [...], offsets [...] or None, and steps f32[...,group], of groups."""

    scale: Tensor
    offset: Tensor | None
    steps: Tensor


@method
class LeastSquares(Method):
    """rounds: how often scales are fitted and values rounded anew. ranges: how many first ranges
    are tried, from the whole one down by `shrink` in all; the best result stays."""

    rounds: Annotated[int, Field(ge=1, le=64)] = 3
    ranges: Annotated[int, Field(ge=1, le=64)] = 1
    shrink: Annotated[float, Field(ge=0, lt=1)] = 0.3

    name: ClassVar[str] = "least_squares"
    reads_text: ClassVar[bool] = False
    text_helps: ClassVar[bool] = True
    windows: ClassVar[int] = 16

    def prepared(self, moments: Moments) -> Tensor:
        """How much each channel counts, f32[K]: see `importance`."""
        return importance(moments.hessian.diagonal())

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Tensor | None) -> Quantized:
        """prepared: how much each channel counts f32[K]; None: as much as the others."""
        used = None if prepared is None else prepared.view(-1, numeric.group)
        found = []
        for some in weight.split(max(1, AT_ONCE // weight.shape[1])):
            grouped = some.float().unflatten(1, (-1, numeric.group))
            scale, offset, steps = self._best(grouped, used, numeric)
            found.append((scale, offset, pack(steps.flatten(1).to(torch.uint8), numeric.bits)))
        scales, offsets, packed = zip(*found, strict=True)
        moved = None if offsets[0] is None else torch.cat(offsets)
        return Quantized(torch.cat(packed), torch.cat(scales), moved)

    def _best(self, x: Tensor, used: Tensor | None, numeric: Numeric) -> Fitted:
        """Of groups f32[N,G,group]."""
        best = self.fitted(x, used, numeric)
        least = _error(x, used, best, numeric) if self.ranges > 1 else None
        for i in range(1, self.ranges):
            assert least is not None
            found = self.fitted(x, used, numeric, 1 - self.shrink * i / (self.ranges - 1))
            error = _error(x, used, found, numeric)
            best = where_better(error < least, found, best)
            least = torch.minimum(error, least)
        return best

    def fitted(self, x: Tensor, used: Tensor | None, numeric: Numeric, part: float = 1.0) -> Fitted:
        """Groups f32[...,group] after all turns, the first with this part of the whole range,
        around its middle. used: how much each value counts, f32[...,group]."""
        scale, offset = numeric.scales(x)
        if part != 1:
            narrow = scale.float() * part
            if offset is not None:
                left = (scale.float() - narrow) * ((2**numeric.bits - 1) / 2)
                offset = numeric.stored(offset.float() + left)
            scale = numeric.stored(narrow)
        found = Fitted(scale, offset, _steps(x, scale, offset, numeric))
        for _ in range(self.rounds):
            scale, offset = solved(x, found, used, numeric)
            found = Fitted(scale, offset, _steps(x, scale, offset, numeric))
        return found


def importance(squares: Tensor) -> Tensor:
    """How much each channel counts, f32[K]: its mean square, up to a factor [K], as a share of all
    channels' mean."""
    squares = squares.float().clone()
    squares /= squares.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return squares.clamp_(min=LEAST)


def solved(
    x: Tensor, now: Fitted, used: Tensor | None, numeric: Numeric
) -> tuple[Tensor, Tensor | None]:
    """The best scales and offsets for these steps, in their dtype; those given where all steps are
    alike, or the best scale is not above zero."""
    q = now.steps if now.offset is not None else now.steps - 2 ** (numeric.bits - 1)
    weighted = q if used is None else q * used
    squares, products = (weighted * q).sum(-1), (weighted * x).sum(-1)
    if now.offset is None:
        found = numeric.stored(products / squares.clamp(min=1e-30))
        return torch.where((squares > 0) & (found > 0), found, now.scale), None
    if used is None:
        count, values = torch.tensor(float(numeric.group)), x.sum(-1)
    else:
        count, values = used.sum(-1), (used * x).sum(-1)
    sums = weighted.sum(-1)
    spread = count * squares - sums * sums  # 0 for steps that are all alike
    scale = (count * products - sums * values) / spread.clamp(min=1e-30)
    stored = numeric.stored(torch.where(spread > 1e-6 * count * squares, scale, 0))
    offset = numeric.stored((values - stored.float() * sums) / count)
    fine = stored > 0
    return torch.where(fine, stored, now.scale), torch.where(fine, offset, now.offset)


def _steps(x: Tensor, scale: Tensor, offset: Tensor | None, numeric: Numeric) -> Tensor:
    return numeric.steps(x, scale[..., None], None if offset is None else offset[..., None])


def _error(x: Tensor, used: Tensor | None, found: Fitted, numeric: Numeric) -> Tensor:
    """The squared error of each group, [N,G]."""
    offset = None if found.offset is None else found.offset[..., None]
    error = (numeric.values(found.steps, found.scale[..., None], offset) - x).square_()
    return (error if used is None else error.mul_(used)).sum(-1)
