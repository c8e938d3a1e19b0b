"""How steps on a GPU are worked out, as far as the CPU can tell: by the same formulas."""

from __future__ import annotations

import pytest
import torch

from graftwork.backends.torch.gpu import NARROW, attend
from graftwork.ir.ops.attention import attend as meaning

BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def operands(
    dtype: torch.dtype, batch: int, width: int, heads: int = 4, groups: int = 2, rows: int = 40
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(width)
    sizes = [(batch, heads, width, 12), *2 * [(batch, groups, rows, 12)]]
    made = [torch.randn(size, generator=random).to(dtype) for size in sizes]
    seen = torch.rand((batch, 1, width, rows), generator=random) < 0.6
    seen[..., 0] = True
    return [*made, seen]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("batch", "width"), [(1, 1), (1, 5), (3, 1), (2, 7), (1, NARROW + 1)])
@pytest.mark.parametrize("scale", [12**-0.5, 0.25, 3.0])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_is_what_the_op_means(
    dtype: torch.dtype, batch: int, width: int, scale: float, biased: bool
) -> None:
    given = operands(dtype, batch, width)
    bias = torch.randn(batch, 4, width, 40) if biased else None
    found = attend(*given, bias, scale=scale)
    floats = [tensor.float() for tensor in given[:3]]
    wanted = meaning(*floats, given[3], bias, scale=scale)
    assert found.dtype is dtype
    assert (found.float() - wanted).abs().max() <= BOUNDS[dtype] * wanted.abs().max()


@pytest.mark.parametrize("given", [{"softcap": 2.0}, {"sinks": torch.randn(4)}])
def test_what_scores_alone_do_not_say_is_left_to_the_library(given: dict[str, object]) -> None:
    args = operands(torch.float32, 2, 3)
    found, wanted = (how(*args, scale=0.25, **given) for how in (attend, meaning))  # type: ignore
    assert torch.allclose(found, wanted)


def test_scores_of_large_halves_are_numbers() -> None:
    """Products of float16 end at 65,504: what is scaled before stays below where it can."""
    q, k, v, mask = operands(torch.float16, 1, 1)
    found = attend(q * 250, k * 250, v, mask, scale=2.0**-9)
    assert found.isfinite().all()


def test_hidden_rows_have_no_influence() -> None:
    q, k, v, mask = operands(torch.float32, 1, 3)
    before = attend(q, k, v, mask, scale=0.5)
    hidden = ~mask.any(2)[:, :, :, None].expand(k.shape)
    k[hidden], v[hidden] = 1e30, 1e4
    assert torch.equal(attend(q, k, v, mask, scale=0.5), before)
