"""Random calls of the kernels that give rows of a cache their codes."""

from __future__ import annotations

from typing import Any

import torch
from operands import F32, Case, Maker, want
from torch import Tensor

from graftwork.backends.torch import native
from graftwork.ir.ops import old_rows

KEPT = frozenset({"rows"})
"""Laid out as they are: of equal rows nothing is farthest, and what codes leave out is noise."""


def _stored(make: Maker) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Rows that become codes, how many a text has, and options."""
    draw = make.random.choice
    by_channel, width, group = draw((True, False)), draw((8, 24, 40, 64)), draw((4, 8, 32))
    each = group if by_channel else min(group, width)
    count = draw((each, 2 * each, 32)) if by_channel else draw((1, 8, 33))
    operands = {
        "rows": make.numbers(draw((1, 2)), draw((1, 3)), count, width),
        "past": torch.tensor([draw((0, 63, 64, 70, 90))]),
    }
    operands["past"] = operands["past"].expand(len(operands["rows"])).contiguous()
    options = {"bits": draw((2, 3, 4, 8)), "group": group, "by_channel": by_channel, "after": 64}
    return operands, options | {"outliers": draw((0, 0, 1, 2))}


def native_store_groups(make: Maker) -> Case:
    given, options = _stored(make)
    batch, groups, _, width = given["rows"].shape
    by, group, kinds = options["by_channel"], options["group"], 2 + 2 * options["outliers"]
    outer = (batch, groups)
    shared = width if by else max(width // min(group, width), 1)
    codes = torch.randint(0, 256, (*outer, 96, width * options["bits"] // 8))
    steps = make.numbers(*outer, 96 // group if by else 96, kinds * shared).half()
    recent = make.numbers(*outer, make.random.choice((64, 70)), width)
    operands: dict[str, Any] = {"codes": codes.to(torch.uint8), "steps": steps, "recent": recent}

    def meaning(*tensors: Any, **told: Any) -> Any:
        want(tensors[2].dtype == tensors[3].dtype == F32)
        return old_rows.store_groups(*tensors, **told)

    def call(*tensors: Any, **told: Any) -> Any:
        return native.OPS["store_groups"](*tensors, *told.values())

    return Case("store_groups", call, meaning, operands | given, options, kept=KEPT, fake=True)


def native_store_factors(make: Maker) -> Case:
    given, options = _stored(make)
    batch, groups, _, width = given["rows"].shape
    rank, group = make.random.choice((1, 2, 3)), options["group"]
    operands: dict[str, Any] = {
        "left": make.numbers(batch, groups, 96, rank).half(),
        "right": make.numbers(batch, groups, 96 // group, rank * width).half(),
    }

    def meaning(*tensors: Any, **told: Any) -> Any:
        want(tensors[2].dtype == F32)
        return old_rows.store_factors(*tensors, **told)

    def call(*tensors: Any, **told: Any) -> Any:
        return native.OPS["store_factors"](*tensors, *told.values())

    near = {"rtol": 5e-3, "atol": 5e-3}  # in half precision, after eight rounds
    how: dict[str, Any] = {"kept": KEPT, "fake": True, "tolerance": near}
    return Case("store_factors", call, meaning, operands | given, options, **how)
