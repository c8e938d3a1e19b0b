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

Parts = tuple[Weight, Weight, Weight | None, Weight | None]
"""Weight, scale, offset and codebook of an op, as they are stored; scale and offset in float16 or
float32."""


def quantized_linear(
    e: Emitter,
    x: oir.Value,
    parts: Parts,
    bias: oir.Value | None,
    *,
    bits: int,
    group: int,
    rounded: bool,
    span: int = 0,
) -> Any:
    """`graftwork.quantized_linear` of x f32[..., K], bias f32[N]: f32[..., N].

    Errors: `InputError` for sizes that kernels do not take, and when it is loaded, for the codebook
    of a rounded product that is not of whole numbers.
    """
    lay_out = tiles.tiled if rounded else tiles.tiled_table
    laid = lay_out(*parts, bits=bits, group=group)
    if rounded:
        return _node(e, "QuantizedLinear", x, laid, bias, span=span)
    return _node(e, "FloatLinear", x, laid, bias)


def quantized_embedding(e: Emitter, ids: oir.Value, parts: Parts, *, bits: int, group: int) -> Any:
    """`graftwork.quantized_embedding` of ids i64[...]: f32[..., K]."""
    laid = tiles.tiled_table(*parts, bits=bits, group=group)
    return _node(e, "QuantizedEmbedding", ids, laid)


def _node(
    e: Emitter, op: str, x: oir.Value, laid: tiles.Tiled, *bias: oir.Value | None, **options: int
) -> Any:
    values = [None if part is None else e.weight(part) for part in laid.parts]
    options |= {"bits": laid.bits, "group": laid.group, "N": laid.outputs}
    return e.own(op, x, *values, *bias, **options)
