"""Quantization schemes and tensor layout of compressed-tensors.

Codes are packed along each row into 32-bit words, zero points along each column. See also
`frontends.huggingface.formats.compressed_tensors`, the reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ir import TensorType, UnsupportedError, Weight, derivation, derive
from ..ir.ops.numerics import pack

PACKED, BYTES = "pack-quantized", "int-quantized"


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme of the format. group: group size, 0 for one scale per row. rounded:
    activations are quantized to int8, in groups of `span` values, 0 for one scale per token."""

    bits: int
    group: int
    symmetric: bool
    rounded: bool
    span: int

    @property
    def format(self) -> str:
        """Of the codes."""
        return BYTES if self.bits == 8 and self.rounded and not self.group else PACKED

    def described(self, targets: list[str]) -> dict[str, Any]:
        """An entry of `config_groups`."""
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "int", "dynamic": False}
        weights["symmetric"] = self.symmetric
        weights["strategy"] = "group" if self.group else "channel"
        weights["group_size"] = self.group or None
        given = {"num_bits": 8, "type": "int", "dynamic": True, "symmetric": True}
        parts = {"strategy": "group", "group_size": self.span} if self.span else {}
        inputs = {**given, "strategy": "token", **parts} if self.rounded else None
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": self.format,
        }


def stored(
    module: str, parts: Sequence[Weight | None], bits: int, as_bytes: bool, shape: Sequence[int]
) -> Iterator[Weight]:
    """The tensors of a module's weight [N,K]. parts: weight, scale and offset of the program.
    as_bytes: codes as signed bytes, not in words. Errors: `UnsupportedError` for offsets that are
    no multiple of the scale."""
    packed, scale, offset = parts
    assert packed is not None and scale is not None
    rows, columns = shape
    yield scale.renamed(f"{module}.weight_scale")
    zeros = None if offset is None else _zeros(module, scale, offset, bits)
    if as_bytes:
        yield _made(f"{module}.weight", torch.int8, shape, signed_codes, packed)
        if zeros is not None:
            dims = zeros.type.shape
            yield _made(f"{module}.weight_zero_point", torch.int8, dims, signed_codes, zeros)
        return
    words = -(-columns * bits // 32)
    yield _made(f"{module}.weight_packed", torch.int32, (rows, words), filled_words, packed)
    yield Weight.of(f"{module}.weight_shape", torch.tensor([rows, columns]))
    if zeros is not None:
        count, groups = zeros.type.shape
        dims = (-(-count * bits // 32), groups)
        name = f"{module}.weight_zero_point"
        yield _made(name, torch.int32, dims, words_down, zeros, bits=bits)


def _zeros(owner: str, scale: Weight, offset: Weight, bits: int) -> Weight:
    """Zero points u8[N,G] in 0..2^bits-1. Errors: `UnsupportedError` for fractional ones."""
    steps, moves = scale.load().float(), offset.load()
    zeros = (-moves.float() / steps).round()
    same = (-steps * zeros).to(moves.dtype) == moves
    if not bool(same.all()) or zeros.min() < 0 or zeros.max() >= 2**bits:
        raise UnsupportedError(
            f"{owner}.weight has offsets that are no multiples of the scale, as compressed-tensors "
            f"requires: quantize symmetrically "
            f"(quantize_weights.symmetric=true)"
        )
    return derive(f"{owner}.zeros", scale.type.with_dtype(torch.uint8), whole_points, scale, offset)


def _made(
    name: str, dtype: torch.dtype, dims: Any, function: Any, *inputs: Weight, **options: int
) -> Weight:
    return derive(name, TensorType(dtype, tuple(dims)), function, *inputs, **options)


@derivation
def whole_points(scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Zero points u8[N,G] of offsets that are multiples of the scale."""
    return (-offset.float() / scale.float()).round().to(torch.uint8)


@derivation
def signed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Unsigned bytes as signed ones, 128 becoming 0."""
    return (codes ^ 128).view(torch.int8)


@derivation
def filled_words(packed: torch.Tensor) -> torch.Tensor:
    """A bitstream along each row as int32, padded with zeros."""
    return nn.functional.pad(packed, (0, -packed.shape[1] % 4)).contiguous().view(torch.int32)


@derivation
def words_down(zeros: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Values u8[N,G] as a bitstream down each column i32[N*bits/32,G]."""
    count = zeros.shape[0]
    across = nn.functional.pad(zeros.T, (0, -count % 32))
    return filled_words(pack(across, bits))[:, : -(-count * bits // 32)].T.contiguous()
