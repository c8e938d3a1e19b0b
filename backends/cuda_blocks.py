"""Which weights of few bits have kernels on a GPU: those of ONNX Runtime's CUDA provider."""

from __future__ import annotations

import torch
import torch.fx

from ..ir import arguments

BITS, BLOCKS = (4, 8), (128, 64, 32, 16)
"""Bits of MatMulNBits on CUDA, and values that share a scale."""


def runs_on_cuda(node: torch.fx.Node) -> bool:
    """Whether kernels of CUDA's provider do a call that reads weights of few bits."""
    given = arguments(node)
    if not is_stored(node) or given["codebook"] is not None:
        return False
    if node.target is torch.ops.graftwork.quantized_embedding.default:
        return bool(given["bits"] == 8)  # fewer are taken apart by ops that it has not
    return cuda_layout(int(given["bits"]), int(given["group"])) is not None


def is_stored(node: torch.fx.Node) -> bool:
    """Whether all that is stored of the weight are weights of the program."""
    given = arguments(node)
    parts = (given[name] for name in ("weight", "scale", "offset", "codebook"))
    return all(part.op == "get_attr" for part in parts if part is not None)


def cuda_layout(bits: int, group: int) -> tuple[int, int] | None:
    """Bits and values a block in which MatMulNBits takes weights there; None if it does not."""
    wide = next((b for b in BITS if b >= bits), None)
    block = next((b for b in BLOCKS if group % b == 0), None)
    return None if wide is None or block is None else (wide, block)
