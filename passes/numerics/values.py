"""Weights of few bits as the floats that they stand for, where something needs those."""

from __future__ import annotations

import torch
import torch.fx

from ...ir import TensorType, Weight, WeightStore, arguments, derive
from ...ir.ops.numerics import stored_floats

G = torch.ops.graftwork
STORED = ("weight", "scale", "offset", "codebook")


def are_constant(node: torch.fx.Node) -> bool:
    """Whether all that a product or look-up of few bits has of its weight are weights."""
    parts = (arguments(node)[name] for name in STORED)
    return all(part is None or part.op == "get_attr" for part in parts)


def values_of(node: torch.fx.Node, weights: WeightStore) -> Weight:
    """The values f32[N,K] of the weight of a `quantized_linear` (see `are_constant`), worked out
    when they are loaded."""
    given = arguments(node)
    parts = [None if given[name] is None else weights[str(given[name].target)] for name in STORED]
    weight, scale = parts[:2]
    assert weight is not None and scale is not None
    rows, groups = (int(str(dim)) for dim in scale.type.dims)
    type = TensorType(torch.float32, (rows, groups * given["group"]))
    return derive(f"{weight.name}.values", type, stored_floats, *parts, bits=given["bits"])
