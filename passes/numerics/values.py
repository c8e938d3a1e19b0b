"""Weights of few bits as the floats that they stand for, where something needs those."""

from __future__ import annotations

import torch
import torch.fx

from ...ir import (
    TensorType,
    Weight,
    WeightStore,
    arguments,
    derivation,
    derive,
)
from ...ir.ops.numerics import dequantize

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
    there = [part for part in parts if part is not None]
    rows, groups = (int(str(dim)) for dim in there[1].type.dims)

    type = TensorType(torch.float32, (rows, groups * given["group"]))
    names = tuple(name for name, part in zip(STORED, parts, strict=True) if part is not None)
    return derive(f"{there[0].name}.values", type, values, *there, names=names, bits=given["bits"])


@derivation
def values(*tensors: torch.Tensor, names: tuple[str, ...], bits: int) -> torch.Tensor:
    """The floats f32[N,K] that the parts of a weight of few bits stand for; names: which they are,
    of `STORED`."""
    given = dict(zip(names, tensors, strict=True))
    weight, scale, offset, codebook = map(given.get, STORED)
    assert weight is not None and scale is not None
    return dequantize(weight, scale, offset, codebook, bits=bits)
