"""Experts of bytes with rounded activations, by ONNX Runtime's own kernels.

A Loop goes over the experts that some row chose: it takes their rows, and the bytes of that expert
alone, through the two products and what gates them, each as the meaning of `quantized_experts`
says. What an expert makes of a row is put where the row chose it, so shares are added up in the
order of the choices, and a row has the same bits whatever is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as oir
import torch

from ...ir import Weight
from .byte_products import columns, flat, product_of_rows, quantized_rows, rounded_rows, zero_points
from .emit import Emitter, type_of
from .rows_norm import activated

F32, I64 = torch.float32, torch.int64


@dataclass(frozen=True)
class Stack:
    """The weights of all experts of one projection: u8[E,N,K], scale [E,N,K/group], offset, and a
    bias [E,N]."""

    weight: Weight
    scale: Weight
    offset: Weight | None
    bias: oir.Value | None
    bits: int

    @property
    def is_bytes_by_row(self) -> bool:
        """Whether values are bytes around 128 with one scale a row, and no more."""
        return self.bits == 8 and self.offset is None and self.scale.type.dims[2] == 1

    @property
    def inputs(self) -> int:
        """K."""
        return int(str(self.weight.type.dims[2]))

    def product(
        self, e: Emitter, expert: oir.Value, values: oir.Value, row_scale: oir.Value
    ) -> Any:
        """What i64[] `expert` makes of rounded rows: f32[M,N]."""
        own = e.op("Gather", columns(e, self.weight), expert)
        scale = e.op("Gather", e.weight(flat(self.scale)), expert)
        result = product_of_rows(e, values, row_scale, own, scale)
        if self.bias is None:
            return result
        return e.op("Add", result, e.cast(e.op("Gather", self.bias, expert), F32, e.dtype()))


@dataclass(frozen=True)
class Gate:
    """What is made of gate and up, see `ir.ops.moe.gated`."""

    activation: str
    limit: float | None
    alpha: float | None

    def apply(self, e: Emitter, hidden: oir.Value) -> Any:
        """f32[M,F] of f32[M,2F]."""
        gate, up = e.op("Split", hidden, outputs=2, axis=-1, num_outputs=2)
        if self.limit is not None:
            most, least = e.const(self.limit, F32), e.const(-self.limit, F32)
            gate, up = e.op("Clip", gate, None, most), e.op("Clip", up, least, most)
        if self.alpha is None:
            return e.op("Mul", activated(e, gate, self.activation), up)
        opened = e.op("Sigmoid", e.op("Mul", gate, e.const(self.alpha, F32)))
        return e.op("Mul", e.op("Mul", e.op("Add", up, e.const(1.0, F32)), gate), opened)


def byte_experts(
    e: Emitter,
    x: oir.Value,
    experts: oir.Value,
    weights: oir.Value,
    stacks: tuple[Stack, Stack],
    gate: Gate,
) -> Any:
    """f32[N,H] of f32 x [N,H], the experts i64[N,C] of each row and their shares [N,C]."""
    first, second = stacks
    rows, choices = type_of(experts).dims[0], int(str(type_of(experts).dims[1]))
    width = int(str(type_of(x).dims[1]))
    values, row_scale = quantized_rows(e, x)
    zeros = zero_points(e, x)
    chosen = e.op("Reshape", experts, e.const([-1], I64))
    different = e.op("Unique", chosen)

    def body(turn: oir.Value, before: oir.Value) -> Any:
        expert = e.op("Gather", different, turn)
        places = e.op("NonZero", e.op("Equal", chosen, expert))
        places = e.op("Reshape", places, e.const([-1, 1], I64))
        theirs = e.op("Div", e.op("Reshape", places, e.const([-1], I64)), e.const(choices, I64))
        read, scale, zero = (e.op("Gather", given, theirs) for given in (values, row_scale, zeros))
        hidden = gate.apply(e, first.product(e, expert, read, scale))
        found = second.product(e, expert, *rounded_rows(e, hidden, second.inputs, zero))
        return e.op("ScatterND", before, places, found)

    start = e.op("Expand", e.const(0.0, F32), e.shape((rows * choices, width)))
    found = e.loop(e.op("Size", different), body, start)
    apart = e.op("Reshape", found, e.const([-1, choices, width], I64))
    shares = e.op("Unsqueeze", e.cast(weights, F32), e.const([-1], I64))
    return e.op("ReduceSum", e.op("Mul", apart, shares), e.const([1], I64), keepdims=0)
