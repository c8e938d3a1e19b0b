"""Random calls of the kernels that attend by parts, and to sums of what was dropped."""

from __future__ import annotations

from typing import Any

import torch
from operands import F32, Case, Maker, want
from torch import Tensor

from graftwork.backends.torch import native
from graftwork.ir.ops import dropped, shared


def native_merge_parts(make: Maker) -> Case:
    shape = (*(make.random.choice((1, 2)) for _ in "bh"), make.random.choice((1, 3)))
    width = make.size()
    operands: dict[str, Any] = {}
    for name in "ab":
        weight = make.numbers(*shape)
        if make.random.random() < 0.3:
            weight = torch.full_like(weight, float("-inf"))  # no row is seen
        operands |= {name: make.numbers(*shape, width), f"{name}_weight": weight}

    def meaning(*tensors: Tensor) -> Tensor:
        want(all(t.dtype == F32 for t in tensors))
        return shared.merge_parts(*tensors)

    return Case("merge_parts", native.OPS["merge_parts"], meaning, operands, {}, fake=True)


def native_positive_features(make: Maker) -> Case:
    batch, heads, rank = make.random.choice((1, 2)), make.random.choice((1, 3)), make.size()
    dim, inner = make.size(), make.size()
    operands = {"x": make.numbers(batch, heads, make.size(), dim)}
    operands |= {
        "inner": make.numbers(heads, dim, inner),
        "outer": make.numbers(heads, inner, rank),
    }
    operands["last"] = make.maybe(make.numbers(heads, rank, rank))

    def meaning(*tensors: Any) -> Tensor:
        want(all(t is None or t.dtype == F32 for t in tensors))
        return dropped.positive_features(*tensors)

    near, call = {"rtol": 1e-4, "atol": 1e-3}, native.OPS["positive_features"]
    return Case("positive_features", call, meaning, operands, {}, fake=True, tolerance=near)


def native_read_dropped(make: Maker) -> Case:
    batch, groups, each = (make.random.choice((1, 2)) for _ in range(3))
    width, rank = make.random.choice((1, 3)), make.random.choice((1, 8))
    features = make.numbers(batch, groups * each, width, rank).abs()
    state = make.numbers(batch, groups, rank + make.random.choice((0, 2)), make.size() + 1)
    state[..., -1] = state[..., -1].abs()
    if make.random.random() < 0.3:
        state.zero_()
    past = torch.randint(0, 9, (batch,), generator=make.generator)
    positions = past[:, None] + torch.arange(width) + make.random.choice((0, 5))
    names = ("features", "state", "positions", "past")
    operands = dict(zip(names, (features, state, positions, past), strict=True))

    def meaning(*tensors: Tensor) -> Any:
        want(all(t.dtype == F32 for t in tensors[:2]))
        return dropped.read_dropped(*tensors)

    near, call = {"rtol": 1e-3, "atol": 1e-3}, native.OPS["read_dropped"]
    return Case("read_dropped", call, meaning, operands, {}, fake=True, tolerance=near)
