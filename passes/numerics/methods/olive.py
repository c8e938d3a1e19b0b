"""OliVe: values far from the others take the place of their neighbours.

Values stand in pairs. What is more than a few standard deviations from a group's mean is an
outlier; it is stored as a float of four bits (sign, two bits of exponent, one of mantissa), and its
neighbour in the pair, the victim, becomes a mark that says so. A float abc stands for
(2 + c) * 2^(ab + 2), beyond the 7 of whole numbers: 12, 16, 24, 32, 48, 64, 96 (abc = 0 is none).
Of two outliers in a pair the larger stays. Scales are searched for, each group's by its own squared
error: what the smallest outlier is follows from the scale. A group of 0, a row, is the paper's.

Source: Guo et al., "OliVe: Accelerating Large Language Models via Hardware-friendly Outlier-Victim
Pair Quantization" (2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ....ir import InputError
from ....ir.ops.numerics import LOOKED_UP, Numeric, Quantized, mark, pack
from ..stored import Form
from .base import Method, method

MOST = 7
"""The largest whole number."""

FLOATS = tuple((2 + m) << (e + 2) for e in range(4) for m in range(2))
"""What abc stands for; the first is not used."""

EDGE = (MOST + FLOATS[1]) / 2
"""Beyond it a value is nearer to a float than to a whole number."""

MARK = mark(LOOKED_UP)


@method
class Olive(Method):
    """sigmas: standard deviations from the mean within which values are whole numbers, as the
    search begins. least, most: the shares of that which scales are tried for, and tries: how many.
    """

    sigmas: Annotated[float, Field(gt=0)] = 3.0
    least: Annotated[float, Field(gt=0)] = 0.5
    most: Annotated[float, Field(gt=0)] = 1.5
    tries: Annotated[int, Field(ge=1)] = 26

    name: ClassVar[str] = "olive"
    reads_text: ClassVar[bool] = False

    def form(self, numeric: Numeric, rows: int, columns: int) -> Form:
        """Errors: `InputError` for another number of bits than 4."""
        if numeric.bits != LOOKED_UP:
            raise InputError(f"expected {LOOKED_UP} bits, got {numeric.bits}")
        return Form((replace(numeric, kind="pairs"),))

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Any) -> Quantized:
        """A weight f32[N,K] in pairs."""
        grouped = weight.view(len(weight), -1, numeric.group)
        mean, spread = grouped.mean(-1), grouped.std(-1)
        reach = torch.maximum(
            (mean + self.sigmas * spread).abs(), (mean - self.sigmas * spread).abs()
        )
        scale, least = torch.ones_like(reach), torch.full_like(reach, torch.inf)
        book = codebook()
        for share in torch.linspace(self.least, self.most, self.tries).tolist():
            tried = numeric.stored(reach * share / MOST).float()
            tried = torch.where(tried > 0, tried, torch.ones_like(tried))
            found = _paired(grouped / tried[..., None])[0] * tried[..., None]
            error = (found - grouped).square().sum(-1)
            scale, least = torch.where(error < least, tried, scale), torch.minimum(error, least)
        codes = pairs(grouped / scale[..., None])[1].flatten(1)
        return Quantized(pack(codes, LOOKED_UP), numeric.stored(scale), None, book)


def codebook() -> Tensor:
    """f32[32]: whole numbers by their two's complement, a mark as 0; then floats by their code."""
    whole = [float(code - 16 if code > MARK else code) for code in range(16)]
    whole[MARK] = 0.0
    floats = [0.0, *map(float, FLOATS[1:])]
    return torch.tensor([*whole, *floats, *(-value for value in floats)])


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """What values [...,K] in units of a scale become, and their codes u8[...,K]."""
    found, (outliers, places, victims) = _paired(values)
    codes = found.to(torch.int8).view(-1) % 16
    codes[outliers] = (places + 8 * (values.flatten()[outliers] < 0)).to(torch.int8)
    codes[victims] = MARK
    return found, codes.view(values.shape).to(torch.uint8)


def _paired(values: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """What values become; where the outliers among them are, their abc, and where victims are."""
    flat, size = values.flatten(), values.flatten().abs()
    found = flat.round().clamp_(-MOST, MOST)
    far = (size > EDGE).nonzero()[:, 0]
    beside = far ^ 1
    wins = (size[far] > size[beside]) | ((size[far] == size[beside]) & (far < beside))
    outliers, victims = far[wins], beside[wins]
    floats = torch.tensor(FLOATS, dtype=torch.float32)
    places = torch.bucketize(size[outliers], (floats[2:] + floats[1:-1]) / 2) + 1
    found[outliers] = floats[places] * flat[outliers].sign()
    found[victims] = 0.0
    return found.view(values.shape), (outliers, places, victims)
