"""Nodes of graftwork's own domain: weights of few bits, run by its own kernels.

ONNX Runtime's threads run them, on weights where they lie: the tiles are initializers in the
mapped file. Sessions need the library (`open_session(own_ops=True)`), so they are not for models
that other loaders are to read, and only for the CPU; `probe.quantized_ops_available` says whether
they work.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as oir
import torch

from ...ir import TensorType, Weight, derive
from .. import tiles
from .emit import Emitter


def quantized_linear(
    e: Emitter,
    x: oir.Value,
    weight: Weight,
    scale: Weight,
    offset: Weight | None,
    codebook: Weight | None,
    bias: oir.Value | None,
    *,
    bits: int,
    group: int,
) -> Any:
    """`graftwork.quantized_linear`, rounded, of x f32[..., K], bias f32[N]: f32[..., N].

    Weights are those of the op, as they are stored; scale and offset in float16 or float32.
    Errors: `InputError` for sizes that kernels do not take, and when it is loaded, for a codebook
    that is not of whole numbers.
    """
    outputs, stored = weight.type.shape
    kept = tiles.kept_bits(bits, codebook)
    layout = tiles.Layout(outputs, stored * 8 // bits, kept, group)
    sources = (weight,) if codebook is None else (weight, codebook)
    name = f"{weight.name}.tiles.{bits}.{group}"
    sizes = TensorType(torch.uint8, (layout.tiles, layout.groups, layout.group_bytes))
    packed = derive(name, sizes, partial(_packed, bits=bits, group=group), *sources)
    table = None
    if codebook is not None and bits <= tiles.MOST_LOOKED_UP:
        sixteen = TensorType(torch.int8, (tiles.OUTPUTS,))
        made = partial(tiles.table, bits=bits)
        table = derive(f"{codebook.name}.table.{bits}", sixteen, made, codebook)
    given = [packed, _columns(scale, layout), _columns(offset, layout), table]
    values = [None if w is None else e.weight(w) for w in given]
    return e.own("QuantizedLinear", x, *values, bias, bits=kept, group=group, N=outputs)


def _packed(
    weight: torch.Tensor, codebook: torch.Tensor | None = None, *, bits: int, group: int
) -> torch.Tensor:
    return tiles.pack(weight, bits=bits, group=group, codebook=codebook)


def _columns(scale: Weight | None, layout: tiles.Layout) -> Weight | None:
    if scale is None:
        return None
    sizes = TensorType(scale.type.dtype, (layout.tiles, layout.groups, tiles.OUTPUTS))
    return derive(f"{scale.name}.columns", sizes, tiles.columns, scale)


def quantized_embedding(
    e: Emitter,
    ids: oir.Value,
    weight: Weight,
    scale: Weight,
    offset: Weight | None,
    codebook: Weight | None,
    *,
    bits: int,
    group: int,
) -> Any:
    """`graftwork.quantized_embedding` of ids i64[...]: f32[..., K], the weight as it is stored."""
    given = (weight, scale, offset, codebook)
    values = [None if w is None else e.weight(w) for w in given]
    return e.own("QuantizedEmbedding", ids, *values, bits=bits, group=group)
