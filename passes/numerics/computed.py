"""Weights of few bits whose values a method chooses by no more of a text than how much it uses each
channel: made when they are loaded."""

from __future__ import annotations

import math

import torch

from ...ir import TensorType, Weight, WeightStore, derive
from ...ir.rewrite.subgraph import fresh_name
from ...ir.weights import Call, Operand, derivation_of_parts
from .methods.base import Method
from .rounding import SCALES
from .stored import Form


def computed(
    weight: Weight, form: Form, method: Method, weights: WeightStore, used: Weight | None = None
) -> dict[str, Weight]:
    """The parts of a weight, or a stack of some, by name as it would be alone: made by a method
    that needs no text, when they are loaded. used: how much each channel counts, f32[K]; None: as
    much as the others."""
    *outer, columns = weight.type.shape
    source = _narrow(weight) if method.quick else weight
    parts = {}
    types = form.types(math.prod(outer), columns)
    for place, (name, flat) in enumerate(zip(form.names(weight.name), types, strict=True)):
        type = TensorType(flat.dtype, _dims(flat.dtype, flat.shape, outer))
        options = {"method": method, "form": form, "place": place}
        part = derive(fresh_name(weights, name), type, quantized, source, used, **options)
        parts[name] = weights.alike(part)
    return parts


def _narrow(weight: Weight) -> Weight:
    """What a weight was widened from, which takes less memory; else the weight."""
    (*_, source) = weight.inputs or (weight,)
    widened = Call(torch.ops.aten._to_copy.default, (Operand(0),), {"dtype": torch.float32})
    narrow = source.type.dtype in (torch.float16, torch.bfloat16)
    return source if weight.made == widened and narrow else weight


def _dims(dtype: torch.dtype, flat: tuple[int, ...], outer: list[int]) -> tuple[int, ...]:
    """The dims of a part of a stack of weights, of those that it has for all their rows."""
    by_row = dtype in (torch.uint8, *SCALES.values()) and len(outer) > 1
    return (*outer, flat[-1]) if by_row else flat


@derivation_of_parts("place")
def quantized(
    tensor: torch.Tensor, used: torch.Tensor | None, *, method: Method, form: Form
) -> dict[int, torch.Tensor]:
    """The parts of a weight, or of a stack of some, that a method makes without text, by number.
    used: how much each channel counts, f32[K]."""
    rows, outer = tensor.flatten(0, -2), list(tensor.shape[:-1])
    found = method.parts(rows if method.quick else rows.float(), form, used)
    return {i: p.view(_dims(p.dtype, tuple(p.shape), outer)) for i, p in enumerate(found)}
