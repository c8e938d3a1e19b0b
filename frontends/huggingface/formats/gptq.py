"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A linear layer [N,K] in groups of g input channels is

    qweight i32[K*bits/32, N]     codes q, a bitstream down each column
    scales  f16[K/g, N]
    qzeros  i32[K/g, N*bits/32]   zero points z, a bitstream along each row
    g_idx   i32[K]                the group of each input channel, where they are not in order

and w = scale * (q - z). Format v1 stores z - 1, v2 ("gptq_v2") stores z. Old files of 3 bits have
ten values in each int32, and two bits that are not used; their size tells. Where channels were
quantized by activation order, groups are scattered: the bits are sorted by group here, and products
gather their inputs in that order.
Source: Frantar et al., "GPTQ" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch

from ....ir import InputError, TensorType, UnsupportedError, Weight, derivation, derive
from ....ir.ops.numerics import Numeric, pack
from ...stored_weights import StoredWeight
from .base import Format, Module, Settings, register, settings
from .moves import FLOATS, INT, fits, offsets, sizes, transposed, unpacked

VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""How much less than the zero point is stored, by checkpoint_format."""


class GptqSettings(Settings):
    """bits, group_size (-1: all channels are one group), sym: zero points are the middle."""

    bits: Literal[2, 3, 4, 8]
    group_size: int
    sym: bool = True
    checkpoint_format: str | None = None
    dynamic: dict[str, Any] | None = None


@register
@dataclass(frozen=True)
class Gptq(Format):
    """See the module docstring. less: how much less than the zero point is stored."""

    settings: GptqSettings
    less: int

    method: ClassVar[str] = "gptq"
    mark: ClassVar[str] = "qweight"

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Errors: see `Format.of`; also for settings that differ by module."""
        said = settings(GptqSettings, config, folder)
        where = f"{folder / 'config.json'}: quantization_config"
        if said.group_size < 1 and said.group_size != -1:
            raise InputError(
                f"{where}.group_size: expected -1 or a positive number, got {said.group_size}"
            )
        own = [rule for rule in said.dynamic or {} if not rule.startswith("-:")]
        if own:
            raise UnsupportedError(
                f"{where}.dynamic gives modules settings of their own ({own[0]!r}), which is not "
                f"supported; expected rules that leave modules out (-:)"
            )
        named = said.checkpoint_format or "gptq"
        if named not in VERSIONS:
            raise UnsupportedError(
                f"{where}.checkpoint_format: expected {' or '.join(VERSIONS)}, got {named!r}; "
                f"save the checkpoint in one of these"
            )
        return cls(said, VERSIONS[named])

    def parts(self) -> frozenset[str]:
        return frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def stored(self, module: Module) -> StoredWeight:
        bits, name = self.settings.bits, module.name
        scales = module.scales("scales", FLOATS)
        groups, rows = sizes(scales)
        columns = self._columns(module, groups)
        group = columns if self.settings.group_size == -1 else self.settings.group_size
        module.check_groups(scales, group, columns)
        codes = module.sized("qweight", INT, sizes(module.tensor("qweight", INT))[0], rows)
        order = self._order(module, columns, group)
        affine = self._is_affine(module, groups, rows)
        kind: Literal["affine", "symmetric"] = "affine" if affine else "symmetric"
        numeric = Numeric(bits, group, kind, scales.type.dtype)
        module.fits(numeric, columns)
        zeros = module.tensor("qzeros", INT)
        options = {"bits": bits, "rows": rows, "less": self.less}
        type = TensorType(torch.int32, (groups, rows))
        points = derive(f"{name}.points", type, gptq_points, zeros, **options)
        return StoredWeight(
            numeric,
            _packed(f"{name}.bits", codes, order, numeric, rows, columns),
            transposed(f"{name}.scale", scales),
            offsets(f"{name}.offset", scales, points) if affine else None,
            order=order,
        )

    def _columns(self, module: Module, groups: int) -> int:
        """Input channels: as many as g_idx has, or groups say, or the codes' size says."""
        bits, codes = self.settings.bits, module.tensor("qweight", INT)
        words = sizes(codes)[0]
        columns = words * 32 // bits
        if module.has("g_idx"):
            columns = sizes(module.tensor("g_idx", INT, 1))[0]
        elif self.settings.group_size != -1:
            columns = groups * self.settings.group_size
        if not fits(words, bits, columns):
            raise module.error(
                "qweight",
                f"expected {columns * bits / 32:g} int32 a column, of {columns} input channels of "
                f"{bits} bits, got {codes.type}",
            )
        return columns

    def _is_affine(self, module: Module, groups: int, rows: int) -> bool:
        """Whether zero points are not the middle. Errors: `InputError` if `sym` says otherwise."""
        zeros, bits = module.tensor("qzeros", INT), self.settings.bits
        given, words = sizes(zeros)
        if given != groups or not fits(words, bits, rows):
            raise module.error(
                "qzeros",
                f"expected i32[{groups},{rows * bits / 32:g}] for {groups} groups of {rows} "
                f"outputs in {bits} bits, got {zeros.type}",
            )
        found = gptq_points(zeros.load(), bits=bits, rows=rows, less=self.less)
        middle = 2 ** (bits - 1)
        affine = bool((found != middle).any())
        if self.settings.sym and affine:
            raise module.error(
                "qzeros",
                f"config.json says sym=true and checkpoint_format="
                f"{self.settings.checkpoint_format or 'gptq'}, so that zero points are {middle}, "
                f"but they are {found.min()} to {found.max()}; correct what is wrong of the two "
                f"in config.json (formats: {', '.join(VERSIONS)})",
            )
        return affine

    def _order(self, module: Module, columns: int, group: int) -> Weight | None:
        """Channels sorted by their groups; None if they are already."""
        if not module.has("g_idx"):
            return None
        of_channel = module.sized("g_idx", INT, columns).load().long()
        groups = columns // group
        counts = torch.bincount(of_channel.clamp(0), minlength=groups)
        if of_channel.min() < 0 or len(counts) != groups or (counts != group).any():
            raise module.error(
                "g_idx",
                f"expected {group} channels in each of the groups 0 to {groups - 1}, got groups "
                f"{of_channel.min()} to {of_channel.max()} of {counts.min()} to {counts.max()} "
                f"channels",
            )
        order = torch.argsort(of_channel, stable=True)
        if torch.equal(order, torch.arange(columns)):
            return None
        return Weight.of(f"{module.name}.order", order)


def _packed(
    name: str, codes: Weight, order: Weight | None, numeric: Numeric, rows: int, columns: int
) -> Weight:
    """The codes as our bitstream, which they are already for channels in order, transposed."""
    packed, _ = numeric.types(rows, columns)
    inputs = [codes] if order is None else [codes, order]
    return derive(name, packed, gptq_codes, *inputs, bits=numeric.bits, columns=columns)


@derivation
def gptq_codes(
    words: torch.Tensor, order: torch.Tensor | None = None, *, bits: int, columns: int
) -> torch.Tensor:
    """Codes i32[K*bits/32,N] as a bitstream for each output, channels in an order i64[K]."""
    across = words.T.contiguous()
    if order is None and across.shape[1] * 32 == columns * bits:
        return across.view(torch.uint8)
    values = unpacked(across, bits, columns)
    return pack(values if order is None else values[:, order], bits)


@derivation
def gptq_points(zeros: torch.Tensor, *, bits: int, rows: int, less: int) -> torch.Tensor:
    """The zero points i32[G,N] of what is stored of them."""
    points: torch.Tensor = (unpacked(zeros, bits, rows) + less) % 2**bits
    return points.to(torch.int32)
