"""Nodes of graftwork's own domain: weights of few bits, run by its own kernels.

ONNX Runtime's threads run them, on weights where they lie: the tiles are initializers in the
mapped file. Sessions need the library (`open_session(own_ops=True)`), so they are not for models
that other loaders are to read, and only for the CPU; `probe.quantized_ops_available` says whether
they work.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir

from ...ir import Weight
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
    rounded: bool,
) -> Any:
    """`graftwork.quantized_linear` of x f32[..., K], bias f32[N]: f32[..., N].

    Weights are those of the op, as they are stored; scale and offset in float16 or float32.
    Errors: `InputError` for sizes that kernels do not take, and when it is loaded, for the codebook
    of a rounded product that is not of whole numbers.
    """
    lay_out, op = (
        (tiles.tiled, "QuantizedLinear") if rounded else (tiles.tiled_table, "FloatLinear")
    )
    laid = lay_out(weight, scale, offset, codebook, bits=bits, group=group)
    values = [None if w is None else e.weight(w) for w in laid.parts]
    return e.own(op, x, *values, bias, bits=laid.bits, group=group, N=laid.outputs)


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
    """`graftwork.quantized_embedding` of ids i64[...]: f32[..., K], the table as it is stored."""
    laid = tiles.tiled_table(weight, scale, offset, codebook, bits=bits, group=group)
    values = [None if w is None else e.weight(w) for w in laid.parts]
    return e.own("QuantizedEmbedding", ids, *values, bits=bits, group=group, N=laid.outputs)
