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

from ...ir import Weight, arguments, derive
from .emit import Emitter, row, type_of, weight_of

G = torch.ops.graftwork
I64 = torch.int64


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


def _interleaved(e: Emitter, value: oir.Value | None) -> oir.Value | None:
    """Gate and up rows [E,2F,...] in turns, as the kernel wants them."""
    weight = weight_of(value)
    if weight is None:
        return None
    return e.weight(_in_turns(weight))


def _in_turns(weight: Weight) -> Weight:
    return derive(f"{weight.name}.interleaved", weight.type, _interleave, weight)


def _interleave(t: torch.Tensor) -> torch.Tensor:
    gate, up = t.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(t.shape)
