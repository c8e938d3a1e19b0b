"""AutoRound: slopes of a straight-through rounding, and losses below rounding's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gptq import correlated, moments
from torch import Tensor

from graftwork.ir.ops.numerics import Numeric
from graftwork.passes.engine.moments import loss
from graftwork.passes.numerics.methods.autoround import Learned, gradients, rounded, values
from graftwork.passes.numerics.methods.base import method_of


def straight(grouped: Tensor, learned: Learned, numeric: Numeric) -> Tensor:
    """The rounded values as torch differentiates them, rounding being the identity."""
    most = 2**numeric.bits - 1
    if numeric.kind == "symmetric":
        scale = grouped.abs().amax(-1) * learned.high / (2 ** (numeric.bits - 1) - 1)
        start, middle = torch.zeros_like(scale), 2 ** (numeric.bits - 1)
    else:
        start, middle = grouped.amin(-1) * learned.low, 0
        scale = (grouped.amax(-1) * learned.high - start) / most
    free = (grouped - start[..., None]) / scale[..., None] + learned.shift + middle
    steps = (free + (torch.round(free) - free).detach()).clamp(0, most)
    return (steps - middle) * scale[..., None] + start[..., None]


@pytest.mark.parametrize("kind", ["affine", "symmetric"])
def test_slopes_are_those_of_rounding_as_the_identity(kind: Any) -> None:
    numeric = Numeric(3, 8, kind)
    grouped = torch.randn(5, 4, 8)
    shares = torch.rand(2, 5, 4) * 0.5 + 0.4  # some values are out of range
    learned = Learned(torch.rand(5, 4, 8) - 0.5, shares[0], shares[1])
    pull = torch.randn(5, 4, 8)
    free = Learned(*(part.clone().requires_grad_() for part in learned))
    (straight(grouped, free, numeric) * pull).sum().backward()
    made = rounded(grouped, learned, numeric)
    assert 0.5 < made.inside.float().mean() < 1
    torch.testing.assert_close(values(made, numeric), straight(grouped, learned, numeric))
    found = gradients(grouped, made, pull, numeric)
    for name in ("shift", "high", *(["low"] if kind == "affine" else [])):
        torch.testing.assert_close(getattr(found, name), getattr(free, name).grad, msg=name)


@given(
    seed=st.integers(0, 1000),
    bits=st.sampled_from([2, 3, 4]),
    kind=st.sampled_from(["affine", "symmetric"]),
)
def test_no_row_loses_and_the_whole_gains(seed: int, bits: int, kind: Any) -> None:
    numeric = Numeric(bits, 16, kind, torch.float16)
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(seed))
    seen = moments(correlated(64, seed=seed))
    made = method_of("autoround", {"steps": 50}).quantize(weight, numeric, seen)
    now = loss(weight - numeric.dequantize(made), seen.hessian)
    plain = loss(weight - numeric.dequantize(numeric.quantize(weight)), seen.hessian)
    assert (now <= plain * (1 + 1e-5)).all() and now.sum() < 0.8 * plain.sum()
