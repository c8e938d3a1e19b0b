"""Rows of a cache get codes: the kernels, in all forms, beside what the ops say."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from test_own_attention import node

from graftwork.backends.onnxruntime.own_ops import node_name
from graftwork.backends.torch import native
from graftwork.ir import InputError
from graftwork.ir.ops import all_ops
from graftwork.ir.ops.grouped_cache import quantize_groups
from graftwork.ir.ops.row_forms import low_rank, low_rank_rows

GROUPS, FACTORS = all_ops()["store_groups"], all_ops()["store_factors"]
AFTER = 192


def stored(width: int, bits: int, by_channel: bool, outliers: int) -> tuple[list[Any], Any]:
    """Operands of `store_groups` on two sequences, the first of which is due, and options."""
    how: dict[str, Any] = {"bits": bits, "group": 32 if width % 32 == 0 else 8}
    how |= {"by_channel": by_channel, "outliers": outliers}
    generator = torch.Generator().manual_seed(bits + width)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    codes, steps = quantize_groups(draw(2, 3, 256, width), **how)
    rows = draw(2, 3, 64, width) * torch.rand(width, generator=generator).exp() + 0.3
    past = torch.tensor([AFTER + 64, AFTER - 1])
    return [codes, steps, draw(2, 3, 200, width), rows, past], how | {"after": AFTER}


@pytest.mark.parametrize("width", [64, 24, 256])
def test_codes_steps_and_latest_rows_are_those_of_the_meaning_to_the_bit(width: int) -> None:
    for bits, by_channel, outliers in product((2, 3, 4, 8), (True, False), (0, 1, 3)):
        given, how = stored(width, bits, by_channel, outliers)
        wanted = GROUPS.meaning(*given, **how)
        options = [how[name] for name in GROUPS.declared.names[len(given) :]]
        found = native.OPS["store_groups"](*given, *options)
        assert all(map(torch.equal, found, wanted)), (bits, by_channel, outliers)
        assert all(torch.equal(new[1], old[1]) for new, old in zip(found, given, strict=False))
        assert torch.equal(found[2][0, :, :128], given[2][0, :, 64:AFTER])


@pytest.mark.parametrize(("width", "rank"), [(64, 2), (24, 1), (128, 4)])
def test_factors_approximate_what_codes_leave_out_as_the_meaning_does(
    width: int, rank: int
) -> None:
    for by_channel, outliers in product((True, False), (0, 1)):
        (*_, rows, past), how = stored(width, 2, by_channel, outliers)
        group = how["group"]
        factors = low_rank(torch.randn(2, 3, 256, width), group=group, rank=rank)
        given = [*factors, rows, past]
        options = [how[name] for name in FACTORS.declared.names[len(given) :]]
        found, wanted = (
            native.OPS["store_factors"](*given, *options),
            FACTORS.meaning(*given, **how),
        )
        made, meant = (low_rank_rows(*part, group=group) for part in (found, wanted))
        torch.testing.assert_close(made, meant, rtol=2e-3, atol=2e-3)
        other = node(
            node_name(FACTORS), dict(zip(FACTORS.declared.names, given, strict=False)), **how
        )
        assert all(map(torch.equal, other, found))


def test_numbers_that_half_precision_has_no_room_for() -> None:
    given, how = stored(64, 4, True, 1)
    given[3][0, 0, :3, :4] = torch.tensor([[1e30], [-1e30], [7e4]])
    given[3][0, 1] *= 1e-7
    given[3][0, 2] = 0.25
    options = [how[name] for name in GROUPS.declared.names[len(given) :]]
    found = native.OPS["store_groups"](*given, *options)
    assert all(map(torch.equal, found, GROUPS.meaning(*given, **how)))


def test_operands_that_do_not_fit_are_refused() -> None:
    given, how = stored(64, 4, True, 0)
    kernel = native.OPS["store_groups"]
    for change, said in (
        ({"bits": 5}, "expected bits"),
        ({"outliers": 32}, "outliers=32 of groups of 32"),
        ({"after": 201}, "expected rows <= after <= latest rows, got 64, 201 and 200"),
        ({"group": 48}, "no multiple of group=48"),
        ({"by_channel": False}, "have codes"),
    ):
        told = how | change
        with pytest.raises(InputError, match=said):
            GROUPS.overload(*given, **told)
        with pytest.raises(InputError, match=said):
            kernel(*given, *(told[name] for name in GROUPS.declared.names[len(given) :]))
