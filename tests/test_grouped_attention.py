"""Attention over codes of groups: the kernel, in all forms, beside the op's meaning."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from test_own_attention import node

from graftwork.backends.onnxruntime.own_ops import node_name
from graftwork.backends.own_kernels import zero_of
from graftwork.backends.torch import native
from graftwork.ir.ops import all_ops
from graftwork.ir.ops.grouped_cache import quantize_groups
from graftwork.ir.ops.row_forms import low_rank

OP = all_ops()["attend_grouped"]
OPTIONS = len(OP.declared.names) - 17
EXTRAS = {
    "plain": (0, 0, False, False),
    "an outlier": (1, 0, False, False),
    "outliers and a low rank": (2, 2, False, False),
    "turned": (0, 0, True, False),
    "rotated": (0, 0, False, True),
    "an outlier, rotated": (1, 0, False, True),
    "turned and rotated": (0, 0, True, True),
    "turned and rotated with more": (1, 1, True, True),
}


def operands(
    widths: tuple[int, int],
    bits: int,
    by: tuple[bool, bool],
    extra: str,
    batch: int = 2,
    tokens: int = 5,
    rows: int = 256,
) -> list[Any]:
    outliers, rank, turned, rotated = EXTRAS[extra]
    groups, group = 2, 32 if all(width % 32 == 0 for width in widths) else 8
    generator = torch.Generator().manual_seed(bits + sum(widths))
    stored, factors = [], []
    for width, by_channel in zip(widths, by, strict=True):
        x = torch.randn(batch, groups, rows, width, generator=generator)
        how: dict[str, Any] = {"bits": bits, "group": group, "outliers": outliers}
        stored.append(
            (
                *quantize_groups(x, by_channel=by_channel, **how),
                torch.randn(batch, groups, 160, width, generator=generator),
            )
        )
        factors += low_rank(0.1 * x, group=group, rank=rank) if rank else (None, None)
    mask = torch.rand(batch, 1, tokens, rows, generator=generator) < 0.6
    mask[..., 0], mask[0, :, :, rows - 56 :] = True, False
    angle = torch.rand(1, rows, widths[0] // 2, generator=generator)
    angles = (angle.cos(), angle.sin()) if rotated else (None, None)
    how |= {"keys_by_channel": by[0], "values_by_channel": by[1], "turned": turned}
    how |= {"residual": 64, "block": 32, "scale": widths[0] ** -0.5}
    q = torch.randn(batch, 4, tokens, widths[0], generator=generator)
    past = torch.tensor([rows - 53, 96])[:batch]
    given = (q, *stored[0], *stored[1], past, mask, None, None, *factors, *angles)
    return list(OP.declared.bound(*given, **how))


def meaning(given: list[Any]) -> torch.Tensor:
    options = dict(zip(OP.declared.names[-OPTIONS:], given[-OPTIONS:], strict=True))
    found: torch.Tensor = OP.meaning(*given[:-OPTIONS], **options)
    return found


@pytest.mark.parametrize("widths", [(64, 64), (128, 32), (24, 40), (256, 256)])
def test_the_kernel_does_what_the_op_says(widths: tuple[int, int]) -> None:
    kernel, wrong = native.OPS["attend_grouped"], []
    for bits, *by, extra in product((2, 3, 4, 8), (True, False), (True, False), EXTRAS):
        if "turned" in extra and any(width & (width - 1) for width in widths):
            continue
        given = operands(widths, bits, (by[0], by[1]), extra)
        wanted, found = meaning(given), kernel(*given)
        if not torch.allclose(found, wanted, rtol=1e-5, atol=2e-5 * float(wanted.abs().max())):
            wrong.append(f"{bits} bits, by channel {by}, {extra}")
    assert not wrong, wrong


@pytest.mark.parametrize("by", [(True, False), (False, True)])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_row_has_the_same_bits_in_any_company(extra: str, by: tuple[bool, bool]) -> None:
    """Alone, in gangs of eight, and among more than read rows together."""
    given = operands((64, 64), 3 if by[0] else 4, by, extra, tokens=40)
    kernel = native.OPS["attend_grouped"]
    whole = kernel(*given)
    for some in [*map(slice, range(5), range(1, 6)), slice(7, 15), slice(3, 40)]:
        few = [*given]
        few[0], few[8] = given[0][:, :, some].contiguous(), given[8][:, :, some].contiguous()
        assert torch.equal(kernel(*few), whole[:, :, some]), some


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_row_has_the_same_bits_whatever_threads_share_its_cache(extra: str, tokens: int) -> None:
    """Of a long cache threads share the rows of few tokens; a token has its bits alone, too."""
    given = operands((64, 64), 3, (True, False), extra, tokens=tokens, rows=1120)
    alone = [
        part[:, :, :1].contiguous() if place in (0, 8) else part for place, part in enumerate(given)
    ]
    kernel, before, found = native.OPS["attend_grouped"], torch.get_num_threads(), []
    wanted = meaning(given)
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(kernel(*given))
            assert torch.equal(kernel(*alone), found[0][:, :, :1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], wanted, rtol=1e-5, atol=2e-5 * float(wanted.abs().max()))
    options = dict(zip(OP.declared.names[-OPTIONS:], given[-OPTIONS:], strict=True))
    for threads in (1, 2):
        how = {name: value or zero_of(OP)[name] for name, value in options.items()}
        said = dict(zip(OP.declared.names, given[:-OPTIONS], strict=False))
        (other,) = node(node_name(OP), said, **how, threads=threads)
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("by", [(True, False), (False, True)])
def test_places_that_are_none_are_passed_over(by: tuple[bool, bool]) -> None:
    """A file may hold any: of outliers at places beyond their group nothing is written."""
    given = operands((64, 64), 2, by, "an outlier")
    for place in (2, 5):
        width = given[place].shape[-1] // 4
        for said in (-3.0, 1000.0, float("nan"), float("inf")):
            given[place][..., 2 * width : 3 * width] = said
            assert torch.isfinite(native.OPS["attend_grouped"](*given)).all()
