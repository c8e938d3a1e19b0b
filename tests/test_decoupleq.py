"""decoupleQ: losses that only fall, and scales that are best for their integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gptq import correlated, moments

from graftwork.ir.ops.numerics import Numeric, Quantized, pack
from graftwork.passes.engine.moments import Moments, loss
from graftwork.passes.numerics.methods.base import method_of
from graftwork.passes.numerics.methods.decoupleq import rescaled


def test_scales_by_hand() -> None:
    """w = (1, 2, 3, 8) with q = (0, 1, 2, 3) and H the identity: the line of least squares through
    (0, 1), (1, 2), (2, 3), (3, 8) has the slope 11/5 and the intercept 1/5."""
    numeric = Numeric(2, 4, "affine")
    weight = torch.tensor([[1.0, 2.0, 3.0, 8.0]])
    packed = pack(torch.tensor([[0, 1, 2, 3]]), 2)
    before = Quantized(packed, torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    after = rescaled(weight, before, numeric, torch.eye(4))
    assert after.scale.item() == pytest.approx(2.2, rel=1e-4)
    assert after.offset is not None and after.offset.item() == pytest.approx(0.2, rel=1e-4)
    # The last value counts for nothing: a slope of 1, through 1.
    after = rescaled(weight, before, numeric, torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0])))
    assert after.scale.item() == pytest.approx(1, rel=1e-4)
    assert after.offset is not None and after.offset.item() == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("kind", ["affine", "symmetric"])
def test_no_small_change_of_scales_is_better(kind: Any) -> None:
    numeric = Numeric(2, 8, kind)
    hessian = moments(correlated(32)).hessian
    weight = torch.randn(5, 32)
    start = numeric.quantize(weight)
    best = rescaled(weight, start, numeric, hessian)
    rows = (best.scale != start.scale).all(1)  # none of its scales would have been below zero
    assert rows.sum() >= 3
    least = loss(weight - numeric.dequantize(best), hessian)
    for part in range(1, 3 if kind == "affine" else 2):
        for group in range(4):
            for change in (0.01, -0.01):
                moved = [p.clone() if p is not None else None for p in best]
                moved[part][:, group] += change  # type: ignore[index]
                now = loss(weight - numeric.dequantize(Quantized(*moved)), hessian)  # type: ignore[arg-type]
                assert (now >= least * (1 - 1e-5))[rows].all()


@given(
    seed=st.integers(0, 1000),
    bits=st.sampled_from([2, 3, 4]),
    kind=st.sampled_from(["affine", "symmetric"]),
    scale=st.sampled_from([torch.float16, torch.float32]),
)
def test_a_rows_loss_never_rises(seed: int, bits: int, kind: Any, scale: torch.dtype) -> None:
    numeric = Numeric(bits, 16, kind, scale)
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(seed))
    hessian = moments(correlated(64, seed=seed)).hessian
    before = None
    for rounds in (0, 1, 2, 5):
        options: dict[str, Any] = {"rounds": rounds} if rounds else {"fitted": False}
        method = method_of("decoupleq" if rounds else "gptq", options)
        prepared = method.prepared(Moments(hessian.clone(), torch.ones(64)))
        made = method.quantize(weight.clone(), numeric, prepared)
        damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(64)
        now = loss(weight - numeric.dequantize(made), damped)
        assert before is None or (now <= before * (1 + 1e-5)).all()
        assert before is None or rounds > 1 or now.sum() < 0.95 * before.sum()
        assert (made.scale > 0).all()
        before = now
