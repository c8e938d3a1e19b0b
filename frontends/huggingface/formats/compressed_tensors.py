"""Checkpoints of compressed-tensors, as llm-compressor writes them.

A linear layer [N,K] in groups of g input channels (g = K: by channel) is, in `pack-quantized`,

    weight_packed     i32[N, K*bits/32]    codes q, a bitstream along each row
    weight_scale      [N, K/g]
    weight_zero_point i32[N*bits/32, K/g]  zero points z, a bitstream down each column, if affine
    weight_shape      i64[2]               N and K

with w = scale * (q - z), where z is 2^(bits-1) if there is none; in `int-quantized` and
`naive-quantized` weight is i8[N,K] and zero points i8[N,K/g], both signed; in `float-quantized`
weight is float8 (e4m3) and becomes floats here. A module's tensors say what it is, and the
configuration must have a group that says the same. Where that rounds activations to int8, by token
or in groups of channels, products do.
Source: the format's package, compressed-tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field

from ....ir import GraftworkWarning, TensorType, UnsupportedError, Weight, derivation, derive
from ....ir.ops.numerics import WIDTHS, Numeric, unpack
from ....ir.ops.quantized import misfit
from ....ir.weight_files import SafetensorsFile, open_safetensors
from ...stored_weights import StoredWeight
from .base import Format, Module, Settings, register, settings
from .moves import FLOATS, INT, offsets, sizes

READ = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
"""Values of `format` that are read."""


class Arguments(Settings):
    """How a group of layers has its weights, or its activations."""

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = None
    strategy: str | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class Group(Settings):
    """One of `config_groups`."""

    targets: list[str] = Field(default_factory=list)
    weights: Arguments | None = None
    input_activations: Arguments | None = None
    output_activations: Arguments | None = None

    @property
    def rounds(self) -> bool:
        """Whether activations are rounded as `graftwork.quantized_linear` does it."""
        given = self.input_activations
        if given is None:
            return False
        known = given.strategy == "token" or (given.strategy == "group" and self.span > 0)
        plain = (given.num_bits, given.type, given.symmetric) == (8, "int", True)
        return known and plain and given.dynamic is True

    @property
    def span(self) -> int:
        """Activations that share a scale; 0: those of a token."""
        given = self.input_activations
        grouped = given is not None and given.strategy == "group"
        return (given.group_size or 0) if given is not None and grouped else 0


class CompressedSettings(Settings):
    """What is read of a `quantization_config`."""

    format: str
    config_groups: dict[str, Group]
    kv_cache_scheme: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@register
@dataclass(frozen=True)
class CompressedTensors(Format):
    """See the module docstring."""

    settings: CompressedSettings

    method: ClassVar[str] = "compressed-tensors"
    mark: ClassVar[str] = "weight_scale"

    @classmethod
    def of(cls, config: Mapping[str, Any], folder: Path) -> Self:
        """Errors: see `Format.of`; also for rotations that run beside the model."""
        said = settings(CompressedSettings, config, folder)
        where = f"{folder / 'config.json'}: quantization_config"
        if said.format not in READ:
            raise UnsupportedError(
                f"{where}.format: expected one of {', '.join(READ)}, got {said.format!r}"
            )
        if said.transform_config:
            raise UnsupportedError(
                f"{where}.transform_config: rotations of activations are not supported"
            )
        groups = said.config_groups.values()
        floats = [g.input_activations for g in groups if not g.rounds and g.input_activations]
        left = ["input_activations"] * bool(floats)
        left += ["output_activations"] * any(group.output_activations for group in groups)
        left += ["kv_cache_scheme"] * bool(said.kv_cache_scheme)
        if left:
            warnings.warn(
                f"{where}: {' and '.join(left)}: only weights are read; activations and caches "
                f"stay float",
                GraftworkWarning,
                stacklevel=2,
            )
        return cls(said)

    def parts(self) -> frozenset[str]:
        plain = {"weight", "weight_packed", "weight_shape", "weight_g_idx"}
        return frozenset(plain | {"weight_scale", "weight_zero_point"})

    def stored(self, module: Module) -> StoredWeight | Weight:
        if module.has("weight_g_idx"):
            raise UnsupportedError(
                f"{module.folder}: {module.name}.weight_g_idx: channels in the order of their "
                f"activations (actorder=group) are not supported in this format"
            )
        if module.has("weight_packed"):
            return self._packed(module)
        if module.type_name("weight").startswith("F8"):
            return self._floats(module)
        return self._plain(module)

    def _packed(self, module: Module) -> StoredWeight:
        rows, columns = module.sized("weight_shape", (torch.int64,), 2).load().tolist()
        codes = module.tensor("weight_packed", INT)
        words = sizes(codes)[1]
        bits = words * 32 // columns if columns > 0 else 0
        if sizes(codes)[0] != rows or bits not in WIDTHS or words != -(-columns * bits // 32):
            widths = ", ".join(map(str, WIDTHS))
            raise module.error(
                "weight_packed",
                f"expected i32[{rows},{columns}*bits/32] with {widths} bits, as weight_shape says "
                f"[{rows},{columns}], got {codes.type}",
            )
        scale = self._scale(module, rows, columns)
        groups = sizes(scale)[1]
        zeros = None
        if module.has("weight_zero_point"):
            zeros = module.sized("weight_zero_point", INT, -(-rows * bits // 32), groups)

        numeric = self._numeric(module, bits, columns, scale, zeros)
        packed, _ = numeric.types(rows, columns)
        return StoredWeight(
            numeric,
            derive(f"{module.name}.bits", packed, cut_bytes, codes, count=columns * bits // 8),
            scale,
            self._offset(module, scale, zeros, points_down, bits=bits, rows=rows),
            **self._rounding(module, bits, columns, numeric),
        )

    def _plain(self, module: Module) -> StoredWeight:
        """Codes of a byte each, signed."""
        codes = module.tensor("weight", (torch.int8,))
        rows, columns = sizes(codes)
        scale = self._scale(module, rows, columns)
        zeros = None
        if module.has("weight_zero_point"):
            zeros = module.sized("weight_zero_point", (torch.int8,), *sizes(scale))
        numeric = self._numeric(module, 8, columns, scale, zeros)
        packed, _ = numeric.types(rows, columns)
        return StoredWeight(
            numeric,
            derive(f"{module.name}.bits", packed, unsigned_bytes, codes),
            scale,
            self._offset(module, scale, zeros, unsigned_bytes),
            **self._rounding(module, None, columns, numeric),
        )

    def _floats(self, module: Module) -> Weight:
        """Weights in float8 as floats; their blocks may be of rows and of columns."""
        file = open_safetensors(module.files["weight"])
        key = f"{module.name}.weight"
        rows, columns = file.shape(key)
        scale = module.scales("weight_scale", FLOATS, module.rank("weight_scale"))
        shape = (*sizes(scale), 1)[:2] if scale.type.dims else (1, 1)
        fits = len(sizes(scale)) < 3 and all(
            given in (1, size) or size % given == 0
            for given, size in zip(shape, (rows, columns), strict=True)
        )
        if not fits:
            raise module.error("weight_scale", f"expected one a row or block, got {scale.type}")

        type = TensorType(torch.float32, (rows, columns))
        wide = derive(f"{key}.wide", type, wide_tensor, file=file, key=key)
        return derive(key, type, scaled_blocks, wide, scale, blocks=shape)

    def _scale(self, module: Module, rows: int, columns: int) -> Weight:
        """Scales [N,G]; one for all rows is repeated."""
        scale = module.scales("weight_scale", FLOATS, module.rank("weight_scale"))
        given = sizes(scale)
        if given in ((), (1,), (1, 1)) and rows > 1:
            type = TensorType(scale.type.dtype, (rows, 1))
            return derive(f"{module.name}.scale", type, repeated, scale, rows=rows)
        if len(given) != 2 or given[0] != rows or given[1] < 1 or columns % given[1]:
            raise module.error(
                "weight_scale",
                f"expected [{rows},G] with G groups of the {columns} input channels, got "
                f"{scale.type}",
            )
        return scale

    def _offset(
        self, module: Module, scale: Weight, zeros: Weight | None, read: Any, **options: int
    ) -> Weight | None:
        if zeros is None:
            return None
        dtype = torch.uint8 if read is unsigned_bytes else torch.int32
        type = scale.type.with_dtype(dtype)
        points = derive(f"{module.name}.points", type, read, zeros, **options)
        return offsets(f"{module.name}.offset", scale, points, by_row=True)

    def _numeric(
        self, module: Module, bits: int, columns: int, scale: Weight, zeros: Weight | None
    ) -> Numeric:
        kind: Literal["symmetric", "affine"] = "symmetric" if zeros is None else "affine"
        numeric = Numeric(bits, columns // sizes(scale)[1], kind, scale.type.dtype)
        module.fits(numeric, columns)
        return numeric

    def _rounding(
        self, module: Module, bits: int | None, columns: int, numeric: Numeric
    ) -> dict[str, Any]:
        """How a module's activations are rounded. Errors: as `_group`, and `UnsupportedError` for
        groups of them that no product has."""
        group = self._group(module, bits, columns, numeric)
        if group.rounds and group.span and misfit(group.span, columns, numeric.group):
            raise UnsupportedError(
                f"{module.folder}: {module.name} reads {columns} activations in groups of "
                f"{group.span}, and its weight has groups of {numeric.group}: expected groups that "
                f"divide the row, and are a multiple of the weight's, or a part of them and a "
                f"multiple of 16"
            )
        return {"rounded": group.rounds, "span": group.span if group.rounds else 0}

    def _group(self, module: Module, bits: int | None, columns: int, numeric: Numeric) -> Group:
        """The group of the configuration that says of a module what its tensors say; of several one
        that names it. bits: None, if tensors do not tell."""
        symmetric = numeric.kind == "symmetric"
        named = sorted(
            self.settings.config_groups.values(), key=lambda group: module.name not in group.targets
        )
        for group in named:
            said = group.weights
            if said is None or said.type != "int" or said.symmetric != symmetric:
                continue
            grouped = said.strategy == "group" or (said.group_size or -1) > 0
            size = said.group_size if grouped else columns
            if size == numeric.group and bits in (None, said.num_bits):
                return group
        raise module.error(
            "weight_scale",
            f"the tensors are {'symmetric' if symmetric else 'affine'}, of {numeric.bits} bits in "
            f"groups of {numeric.group}; expected a group of quantization_config.config_groups in "
            f"config.json that says so, got "
            f"{'; '.join(str(g.weights) for g in self.settings.config_groups.values())}",
        )


@derivation
def wide_tensor(*, file: SafetensorsFile, key: str) -> torch.Tensor:
    """A tensor of a file as f32."""
    return file.tensor(key).float()


@derivation
def repeated(scale: torch.Tensor, *, rows: int) -> torch.Tensor:
    """One scale for all rows, [rows,1]."""
    return scale.reshape(1, 1).expand(rows, 1)


@derivation
def scaled_blocks(
    weight: torch.Tensor, scale: torch.Tensor, *, blocks: tuple[int, int]
) -> torch.Tensor:
    """A weight f32[N,K] times scales, of as many blocks along each axis."""
    wide = scale.float().reshape(blocks)
    for axis, size in enumerate(weight.shape):
        wide = wide.repeat_interleave(size // wide.shape[axis], axis)
    return weight * wide


@derivation
def cut_bytes(words: torch.Tensor, *, count: int) -> torch.Tensor:
    """The first bytes of each row of words i32[N,W]."""
    return words.view(torch.uint8)[:, :count].contiguous()


@derivation
def points_down(words: torch.Tensor, *, bits: int, rows: int) -> torch.Tensor:
    """Zero points i32[N,G] of a bitstream down each column."""
    return _stream(words.T, bits, rows).T


@derivation
def unsigned_bytes(signed: torch.Tensor) -> torch.Tensor:
    """Signed bytes as unsigned ones around 128."""
    return signed.view(torch.uint8) ^ 128


def _stream(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first values i32[R,count] of words i32[R,W], whose last may be filled in part."""
    given = words.contiguous().view(torch.uint8)
    filled = torch.nn.functional.pad(given, (0, -given.shape[1] % 3))  # 3 and 6 bits fill 3 bytes
    return unpack(filled, bits)[:, :count]
