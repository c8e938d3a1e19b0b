"""Which weights of few bits have kernels on a GPU: those of ONNX Runtime's CUDA provider, and
graftwork's own for torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx

from ..ir import arguments, type_of
from ..ir.rewrite.stored import are_weights

BITS, BLOCKS = (4, 8), (128, 64, 32, 16)
"""Bits of MatMulNBits on CUDA, and values that share a scale."""


def runs_on_cuda(node: torch.fx.Node, backend: str) -> bool:
    """Whether kernels do a call that reads weights of few bits on a GPU, or what they are compiled
    to reads them as they are stored."""
    given = arguments(node)
    looks_up = node.target is torch.ops.graftwork.quantized_embedding.default
    if backend == "torch":
        columns = int(str(type_of(given["weight"]).dims[1])) * 8 // given["bits"]
        return looks_up or units(given["bits"], given["group"], columns) is not None
    if not are_weights(node) or given["codebook"] is not None:
        return False
    if looks_up:
        return bool(given["bits"] == 8)  # fewer are taken apart by ops that it has not
    return cuda_layout(int(given["bits"]), int(given["group"])) is not None


def cuda_layout(bits: int, group: int) -> tuple[int, int] | None:
    """Bits and values a block in which MatMulNBits takes weights there; None if it does not."""
    wide = next((b for b in BITS if b >= bits), None)
    block = next((b for b in BLOCKS if group % b == 0), None)
    return None if wide is None or block is None else (wide, block)


@dataclass(frozen=True)
class Units:
    """How graftwork's kernels read a row: `count` units of `size` bytes with `values` values, of
    which `each` share a scale."""

    size: int
    values: int
    count: int
    each: int


def units(bits: int, group: int, columns: int) -> Units | None:
    """The widest units of whole values of one group that fill a row of so many values; None if
    there are none."""
    for size in (3,) if bits in (3, 6) else (4, 1):
        values = size * 8 // bits
        if group % values == 0 and columns * bits % (8 * size) == 0:
            return Units(size, values, columns // values, group // values)
    return None
