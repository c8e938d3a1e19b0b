"""The row of sparse mixtures of experts: one kernel that computes the chosen experts only.

com.microsoft.MoE routes by itself: softmax over router logits, the best k, renormalised. Given
chosen experts and weights w, logits of log(w) there and -inf elsewhere make it choose the same
experts with weights w / sum(w); the result is multiplied by sum(w). Weights must not be negative
(routers end in softmax or sigmoid); a negative one gives NaN, not a wrong number.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch
import torch.fx

from ...ir import TensorType, Weight, arguments, derivation, derive
from ...ir import type_of as ir_type
from ...ir.ops.numerics import stored_floats
from ...ir.rewrite.stored import are_weights, stored_in
from .. import tiles
from .byte_experts import Gate, Stack, byte_experts
from .emit import Emitter, native_parts, row, stored_parts, type_of, weight_of
from .probe import quantized_ops_available

G = torch.ops.graftwork
F32, I64 = torch.float32, torch.int64


def _is_swiglu_of_weights(node: torch.fx.Node) -> bool:
    """Whether the kernel has the activation, and the experts are constants."""
    given = arguments(node)
    matrices = [given[n] for n in ("gate_up", "down", "gate_up_bias", "down_bias")]
    constant = all(m is None or m.op == "get_attr" for m in matrices)
    return constant and (given["alpha"] is not None or given["activation"] == "silu")


@row(G.moe.default, when=_is_swiglu_of_weights)
def moe(
    e: Emitter,
    x: oir.Value,
    experts: oir.Value,
    weights: oir.Value,
    gate_up: oir.Value,
    down: oir.Value,
    gate_up_bias: oir.Value | None,
    down_bias: oir.Value | None,
    activation: str,
    limit: float | None,
    alpha: float | None,
) -> Any:
    dtype = e.dtype()
    rows, chosen = type_of(experts).dims
    shares = e.cast(weights, dtype)
    count = int(str(type_of(gate_up).dims[0]))
    nothing = e.op("Expand", e.const(float("-inf"), dtype), e.shape((rows, count)))
    logits = e.op("ScatterElements", nothing, experts, e.op("Log", shares), axis=1)
    mixed = e.fused(
        "MoE",
        x,
        logits,
        _interleaved(e, gate_up),
        _interleaved(e, gate_up_bias),
        down,
        down_bias,
        k=int(str(chosen)),
        activation_type="swiglu",
        swiglu_fusion=1,
        normalize_routing_weights=1,
        activation_alpha=1.0 if alpha is None else alpha,
        activation_beta=0.0 if alpha is None else 1.0,
        swiglu_limit=limit,
    )
    total = e.op("ReduceSum", shares, e.const([1], I64), keepdims=1)
    return e.op("Mul", mixed, total)


def _is_stored_swiglu(node: torch.fx.Node) -> bool:
    return are_weights(node) and _is_swiglu_of_weights(node)


def _has_kernels(node: torch.fx.Node) -> bool:
    """Whether kernels of ours run the products of a mixture, or of experts."""
    stacks = [arguments(node)[name] for name in stored_in(node)]
    whole = all(tiles.whole_tiles(int(str(ir_type(p).dims[1]))) for p in stacks)
    return whole and are_weights(node) and not quantized_ops_available()


native_parts(G.quantized_moe.default, when=_has_kernels)


@row(G.quantized_moe.default, when=_is_stored_swiglu)
def quantized_moe(
    e: Emitter,
    x: oir.Value,
    experts: oir.Value,
    weights: oir.Value,
    gate_up: oir.Value,
    gate_up_scale: oir.Value,
    gate_up_offset: oir.Value | None,
    down: oir.Value,
    down_scale: oir.Value,
    down_offset: oir.Value | None,
    gate_up_bias: oir.Value | None,
    down_bias: oir.Value | None,
    activation: str,
    bits: int,
    group: int,
    down_group: int,
    limit: float | None,
    alpha: float | None,
    rounded: bool,
    span: int,
) -> Any:
    """In models for others: with rounded activations products of bytes, where weights are bytes by
    row; else the float kernel, with values worked out when the model is stored."""
    parts = (gate_up, gate_up_scale, gate_up_offset), (down, down_scale, down_offset)
    biases = gate_up_bias, down_bias
    first, second = (
        Stack(*stored_parts(*part)[:3], bias, bits)
        for part, bias in zip(parts, biases, strict=True)
    )
    exact = first.is_bytes_by_row and second.is_bytes_by_row and not (e.cuda or e.qdq)
    if rounded and exact and not span:
        e.ran["experts", bits, "MatMulIntegerToFloat" if e.contrib else "MatMulInteger"] += 1
        gate = Gate(activation, limit, alpha)
        result = byte_experts(e, e.cast(x, F32), experts, weights, (first, second), gate)
        return e.cast(result, e.dtype(), F32)
    values = [e.weight(_values(stack, bits).cast(e.dtype())) for stack in parts]
    return moe(e, x, experts, weights, *values, *biases, activation, limit, alpha)


def _values(stack: tuple[oir.Value | None, ...], bits: int) -> Weight:
    """What a stored stack stands for, f32[E,R,K]."""
    parts = [part for part in map(weight_of, stack) if part is not None]
    weight = parts[0]
    experts, rows, stored = weight.type.shape
    type = TensorType(torch.float32, (experts, rows, stored * 8 // bits))
    return derive(f"{weight.name}.values", type, stored_floats, *parts, bits=bits)


@row(G.quantized_experts.default, when=_has_kernels, native=True)
def quantized_experts(
    e: Emitter,
    x: oir.Value,
    experts: oir.Value,
    weight: oir.Value,
    scale: oir.Value,
    offset: oir.Value | None,
    bias: oir.Value | None,
    bits: int,
    group: int,
    rounded: bool,
    span: int,
) -> Any:
    stack = stored_parts(weight, scale, offset)[:3]
    laid = tiles.tiled_experts(*stack, bits=bits, group=group)
    values = [None if w is None else e.weight(w) for w in laid.parts[:3]]
    wide, added = (v if v is None else e.cast(v, torch.float32) for v in (x, bias))
    e.ran["experts", bits, tiles.kernel_name()] += 1
    result = e.own(
        "QuantizedExperts",
        wide,
        e.cast(experts, I64),
        *values,
        added,
        bits=bits,
        group=group,
        N=laid.outputs,
        E=stack[0].type.shape[0],
        rounded=int(rounded),
        span=span,
    )
    return e.cast(result, e.dtype(), torch.float32)


def _interleaved(e: Emitter, value: oir.Value | None) -> oir.Value | None:
    """Gate and up rows [E,2F,...] in turns, as the kernel wants them."""
    weight = weight_of(value)
    if weight is None:
        return None
    name = f"{weight.name}.interleaved"
    return e.weight(derive(name, weight.type, interleaved_rows, weight))


@derivation
def interleaved_rows(t: torch.Tensor) -> torch.Tensor:
    """Gate and up rows [E,2F,...] in turns."""
    gate, up = t.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(t.shape)
