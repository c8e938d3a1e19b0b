"""Stored (quantized) weights of calls: operands, and dequantized values.

An op declares which operands are stored weights (`stored=` in `ir.ops`). Their other parts
(`numerics.PARTS`) are operands called like the part, prefixed by the weight's name if there are
several: `scale`, or `gate_up_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.fx

from ..function import arguments
from ..ops import all_ops, op_of
from ..ops.numerics import PARTS, stored_floats
from ..types import TensorType
from ..weights import Weight, WeightStore, derive

Parts = dict[str, torch.fx.Node | None]
"""Operands by `PARTS`; None: absent."""


@cache
def stored_ops() -> tuple[Any, ...]:
    """Ops with stored weights."""
    return tuple(op.overload for op in all_ops().values() if op.stored)


def stored_in(call: torch.fx.Node) -> tuple[str, ...]:
    """Names of a call's operands that are stored weights."""
    op = op_of(call.target)
    return () if op is None else op.stored


def operand(weight: str, part: str) -> str:
    """The operand's name of a part (or "group") of a stored weight."""
    if part == "weight":
        return weight
    return part if weight == "weight" else f"{weight}_{part}"


def parts_of(call: torch.fx.Node, weight: str = "weight") -> Parts:
    """The parts of one of a call's stored weights."""
    given = arguments(call)
    return {part: given.get(operand(weight, part)) for part in PARTS}


def group_of(call: torch.fx.Node, weight: str = "weight") -> int:
    """The group size of one of a call's stored weights."""
    given = arguments(call)
    return int(given.get(operand(weight, "group"), given["group"]))


def product_sizes(call: torch.fx.Node) -> list[tuple[int, int]]:
    """Columns and group size of each of a call's stored weights."""
    sizes = []
    for weight in stored_in(call):
        scale, group = parts_of(call, weight)["scale"], group_of(call, weight)
        assert scale is not None
        sizes.append((int(str(scale.meta["type"].dims[-1])) * group, group))
    return sizes


def are_weights(call: torch.fx.Node) -> bool:
    """Whether all parts of a call's stored weights are weights of the program."""
    parts = [part for weight in stored_in(call) for part in parts_of(call, weight).values()]
    return all(part is None or part.op == "get_attr" for part in parts)


def named_parts(parts: Parts, weights: WeightStore) -> dict[str, Weight]:
    """The weights of parts, without absent ones."""
    return {part: weights[str(node.target)] for part, node in parts.items() if node is not None}


def values_of(call: torch.fx.Node, weights: WeightStore) -> Weight:
    """The dequantized weight f32[N,K] of a call with one stored weight; see `are_weights`."""
    parts, bits = named_parts(parts_of(call), weights), int(arguments(call)["bits"])
    return float_weight(f"{parts['weight'].name}.values", parts, bits)


def float_weight(
    name: str, parts: Mapping[str, Weight], bits: int, dtype: torch.dtype = torch.float32
) -> Weight:
    """The dequantized weight [...,N,K] of parts. Optional part `order` i64[K]: the column that each
    stored column belongs to."""
    *outer, width = parts["weight"].type.shape
    type = TensorType(dtype, (*outer, width * 8 // bits))
    given = [parts.get(part) for part in (*PARTS, "order")]
    return derive(name, type, stored_floats, *given, bits=bits, dtype=dtype)
