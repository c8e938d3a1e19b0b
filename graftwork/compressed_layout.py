"""The tensors of a layer in few bits as compressed-tensors lays them out.

Codes are a bitstream along each row, in words of 32 bits; zero points one down each column. See
`frontends.huggingface.formats.compressed_tensors`, which reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .ir import TensorType, UnsupportedError, Weight, derive
from .ir.numerics import pack


def stored(
    module: str, parts: Sequence[Weight | None], bits: int, as_bytes: bool, shape: Sequence[int]
) -> Iterator[Weight]:
    """The tensors of a module's weight [N,K] in these bits. parts: weight, scale and offset, as
    programs have them. as_bytes: 8 bits as signed bytes, not in words. Errors: `UnsupportedError`
    for offsets between steps."""
    packed, scale, offset = parts
    assert packed is not None and scale is not None
    rows, columns = shape
    yield scale.renamed(f"{module}.weight_scale")
    zeros = None if offset is None else _zeros(module, scale, offset, bits)
    if as_bytes:
        yield _made(f"{module}.weight", torch.int8, shape, _signed, packed)
        if zeros is not None:
            dims = zeros.type.shape
            yield _made(f"{module}.weight_zero_point", torch.int8, dims, _around(128), zeros)
        return
    words = -(-columns * bits // 32)
    yield _made(f"{module}.weight_packed", torch.int32, (rows, words), _words, packed)
    yield Weight.of(f"{module}.weight_shape", torch.tensor([rows, columns]))
    if zeros is not None:
        count, groups = zeros.type.shape
        dims = (-(-count * bits // 32), groups)
        name = f"{module}.weight_zero_point"
        yield _made(name, torch.int32, dims, lambda z: _down(z, bits), zeros)


def _zeros(owner: str, scale: Weight, offset: Weight, bits: int) -> Weight:
    """Zero points u8[N,G] in 0..2^bits-1. Errors: `UnsupportedError` for offsets between steps."""

    def whole(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        zeros = (-offset.float() / scale.float()).round()
        same = (-scale.float() * zeros).to(offset.dtype) == offset
        if not bool(same.all()) or zeros.min() < 0 or zeros.max() >= 2**bits:
            raise UnsupportedError(
                f"{owner}.weight has offsets that are no whole numbers of steps, which "
                f"compressed-tensors cannot say: quantize symmetrically "
                f"(quantize_weights.symmetric=true)"
            )
        return zeros.to(torch.uint8)

    whole(scale.load(), offset.load())
    type = scale.type.with_dtype(torch.uint8)
    return derive(f"{owner}.zeros", type, whole, scale, offset)


def _made(name: str, dtype: torch.dtype, dims: Any, function: Any, *inputs: Weight) -> Weight:
    return derive(name, TensorType(dtype, tuple(dims)), function, *inputs)


def _signed(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned bytes around 128 as signed ones."""
    return (codes ^ 128).view(torch.int8)


def _around(middle: int) -> Any:
    return lambda zeros: (zeros.to(torch.int16) - middle).to(torch.int8)


def _words(packed: torch.Tensor) -> torch.Tensor:
    """A bitstream of bytes along each row as int32, the last one filled with zeros."""
    return nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


def _down(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Values u8[N,G] as a bitstream down each column i32[N*bits/32,G]."""
    count = zeros.shape[0]
    across = nn.functional.pad(zeros.T, (0, -count % 32))
    return _words(pack(across, bits))[:, : -(-count * bits // 32)].T.contiguous()
