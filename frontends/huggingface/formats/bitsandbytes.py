"""Checkpoints of bitsandbytes in 4 bits: nf4, and fp4 in the same layout.

A linear layer [N,K], its values in one row and cut into blocks of B, is

    weight                u8[N*K/2, 1]   codes q; of two in a byte, the first is the upper one
    weight.absmax         f32[N*K/B]     the largest value of each block
    weight.quant_map      f32[16]        the codebook
    weight.quant_state.*  u8             JSON: quant_type, blocksize, shape, ...

and w = absmax * quant_map[q]. Where absmax is quantized, too, it is u8 and stands for
nested_quant_map[absmax] * nested_absmax (of blocks of nested_blocksize) + nested_offset.
Source: Dettmers et al., "QLoRA" (2023).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from pydantic import Field, ValidationError

from ....ir import TensorType, UnsupportedError, Weight, derivation, derive
from ....ir.ops.numerics import Numeric
from ...stored_weights import StoredWeight
from .base import Format, Module, Settings, register, settings
from .moves import sizes

F32, U8 = (torch.float32,), (torch.uint8,)
TYPES = ("nf4", "fp4")
_STATE, _LONGEST = "weight.quant_state.bitsandbytes__", 10_000


class BitsAndBytesSettings(Settings):
    """What is read of a `quantization_config`."""

    load_in_4bit: bool = False
    bnb_4bit_quant_storage: str | None = "uint8"


class State(Settings):
    """What the JSON of a module says."""

    quant_type: str
    blocksize: int = Field(ge=1, le=2**20)
    shape: tuple[int, int]
    nested_blocksize: int | None = Field(None, ge=1, le=2**20)
    nested_offset: float | None = Field(None, allow_inf_nan=False)


@register
@dataclass(frozen=True)
class BitsAndBytes(Format):
    """See the module docstring."""

    method: ClassVar[str] = "bitsandbytes"
    mark: ClassVar[str] = "weight.absmax"

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Errors: see `Format.of`; also for 8 bits."""
        said = settings(BitsAndBytesSettings, config, folder)
        where = f"{folder / 'config.json'}: quantization_config"
        if not said.load_in_4bit:
            raise UnsupportedError(f"{where}.load_in_4bit: only 4 bits are supported, got false")
        if said.bnb_4bit_quant_storage not in (None, "uint8"):
            raise UnsupportedError(
                f"{where}.bnb_4bit_quant_storage: expected uint8, got "
                f"{said.bnb_4bit_quant_storage!r}"
            )
        return cls()

    def parts(self) -> frozenset[str]:
        inner = {"absmax", "quant_map", "nested_absmax", "nested_quant_map"}
        inner |= {f"quant_state.bitsandbytes__{kind}" for kind in TYPES}
        return frozenset({"weight", *(f"weight.{part}" for part in inner)})

    def stored(self, module: Module) -> StoredWeight:
        state = _state(module)
        rows, columns = state.shape
        if rows < 1 or columns < 2 or columns % 2:
            raise module.error("weight", f"expected rows of pairs, got the shape {state.shape}")
        codes = module.sized("weight", U8, rows * columns // 2, 1)
        book = module.sized("weight.quant_map", F32, 16)
        if not torch.isfinite(book.load()).all():
            raise module.error("weight.quant_map", "expected finite numbers")
        largest = _absmax(module, state, -(-rows * columns // state.blocksize))
        group = math.gcd(columns, state.blocksize)
        numeric = Numeric(4, group, "codebook")
        packed, scales = numeric.types(rows, columns)
        every = state.blocksize // group

        return StoredWeight(
            numeric,
            derive(f"{module.name}.bits", packed, swapped_halves, codes, dims=packed.shape),
            derive(
                f"{module.name}.scale",
                scales,
                spread_scales,
                largest,
                every=every,
                dims=scales.shape,
            ),
            codebook=book,
        )


def _state(module: Module) -> State:
    """What the module's JSON says. Errors: `InputError` if it is none or lacks something."""
    known = [_STATE + kind for kind in TYPES if module.has(_STATE + kind)]
    part = known[0] if known else _STATE + TYPES[0]
    tensor = module.tensor(part, U8, 1)
    if sizes(tensor)[0] > _LONGEST:
        raise module.error(part, f"expected at most {_LONGEST} characters of JSON")
    try:
        return State.model_validate(json.loads(bytes(tensor.load().tolist())))
    except (ValueError, RecursionError, ValidationError) as error:
        said = str(error).replace("\n", " ")
        raise module.error(part, f"expected JSON of a quantized weight: {said}") from error


def _absmax(module: Module, state: State, blocks: int) -> Weight:
    """The blocks' largest values f32[blocks], all of them finite."""
    part = "weight.absmax"
    if state.nested_blocksize is None:
        module.sized(part, F32, blocks)
        return module.scales(part, F32, 1)
    size = state.nested_blocksize
    codes = module.sized(part, U8, blocks)
    outer = module.sized("weight.nested_absmax", F32, -(-blocks // size))
    book = module.sized("weight.nested_quant_map", F32, 256)
    offset = state.nested_offset or 0.0

    name, type = f"{module.name}.absmax", TensorType(torch.float32, (blocks,))
    options = {"size": size, "offset": offset}
    made = derive(name, type, nested_scales, codes, outer, book, **options)
    if not torch.isfinite(made.load()).all():
        raise module.error("weight.nested_absmax", "expected finite numbers")
    return made


@derivation
def swapped_halves(codes: torch.Tensor, *, dims: tuple[int, int]) -> torch.Tensor:
    """Bytes with their halves in our order."""
    return (codes >> 4 | codes << 4).reshape(dims)


@derivation
def spread_scales(largest: torch.Tensor, *, every: int, dims: tuple[int, int]) -> torch.Tensor:
    """The largest values of blocks as scales of groups."""
    return largest.repeat_interleave(every)[: dims[0] * dims[1]].reshape(dims)


@derivation
def nested_scales(
    codes: torch.Tensor, largest: torch.Tensor, known: torch.Tensor, *, size: int, offset: float
) -> torch.Tensor:
    """Scales that are quantized themselves, in blocks of `size`."""
    return known[codes.long()] * largest.repeat_interleave(size)[: len(codes)] + offset
