"""The tensors of a GGUF file as the parameters of a model of transformers.

Parameters get the format's names by the `gguf` package's table, and `JOINED` has those that the
format keeps in several tensors. Blocks become `StoredWeight`s without a float detour, also where
rows are kept in another order (`LAYOUTS`). What is laid in another way is dequantized, and what is
of a type that is none of `blocks.TYPES` is rounded to 8 bits, with a warning each.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from ...ir import (
    GraftworkWarning,
    InputError,
    TensorType,
    UnsupportedError,
    Weight,
    derivation,
    derive,
)
from ...ir.ops.numerics import pack
from ...ir.support.names import shown
from ..huggingface.checkpoint import Tensors, concatenated
from ..stored_weights import StoredWeight
from .architectures import Architecture
from .blocks import EIGHT, FLOATS, TYPES, BlockType
from .reader import Entry, GgufFile

JOINED: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    "kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
}
"""The ends of parameters' names, and the tensors of the layer that they are made of, one behind the
other along a layer's outputs."""

Order = tuple[str, tuple[int, ...]]
"""A layout of rows and its sizes, see `LAYOUTS`."""

_AS_IT_IS: Order = ("", ())

_RENAMED = {
    r"\.dt_bias$": ".dt_proj.bias",
    r"\.sinks$": ".sinks.weight",
    r"\.e_score_correction_bias$": ".e_score_correction.bias",
}
"""Ends of parameters' names, and what the package's table knows them by."""

UNUSED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that are no parameters: what frequencies are divided by."""


@dataclass
class Reader:
    """Reads the tensors for a model. known: its architecture. config: that of transformers."""

    file: GgufFile
    known: Architecture
    config: Any
    others: list[str] = field(default_factory=list)
    floats: list[str] = field(default_factory=list)

    def read(self, twin: nn.Module) -> tuple[Tensors, dict[str, StoredWeight]]:
        """The parameters of a model that the file has, and those that it has in few bits.

        Warns (`GraftworkWarning`) of those that are dequantized. Errors: `UnsupportedError` for
        tensors that the model does not have.
        """
        tensors: Tensors = {}
        kept: dict[str, StoredWeight] = {}
        left = dict.fromkeys(self.file.tensors)
        names = self._names(twin)
        for name, parameter in twin.state_dict(keep_vars=True).items():
            parts = [self.file.tensors[n] for n in names(name) if n in self.file.tensors]
            if not parts or len(parts) < len(names(name)):
                continue
            for part in parts:
                left.pop(part.name, None)
            weight = self._weight(name, parts, tuple(parameter.shape))
            if isinstance(weight, StoredWeight):
                kept[name] = weight
                weight = weight.values(name)
            tensors[name] = partial(_itself, weight)
        if strange := [name for name in left if name not in UNUSED]:
            raise UnsupportedError(
                f"{self.file.path}: {len(strange)} tensors are none that a {type(twin).__name__} "
                f"has here: {shown(strange[0])}"
            )
        self._warn()
        return tensors, kept

    def _names(self, twin: nn.Module) -> Callable[[str], tuple[str, ...]]:
        """The file's names of what a parameter is made of."""
        import gguf

        spoken = self.file.metadata.get("general.architecture")
        arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == spoken)
        table = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)

        def names(parameter: str) -> tuple[str, ...]:
            layer = re.search(r"\.(\d+)\.", parameter)
            for end, parts in JOINED.items():
                found = tuple(f"blk.{layer[1] if layer else 0}.{part}" for part in parts)
                if parameter.endswith(f".{end}") and found[0] in self.file.tensors:
                    return found
            ends = (".weight", ".bias")
            for end, theirs in _RENAMED.items():
                parameter = re.sub(end, theirs, parameter)
            for known in (parameter, parameter.removeprefix("transformer.")):
                if (named := table.get_name(known, try_suffixes=ends)) is not None:
                    return (str(named),)
            return ()

        return names

    def _weight(
        self, name: str, parts: Sequence[Entry], dims: tuple[int, ...]
    ) -> StoredWeight | Weight:
        """A parameter of these dims, of one tensor or several."""
        found = next((v for k, v in self.known.layouts.items() if re.search(k, name)), None)
        layout, sizes = (found.kind, found.sizes(self.config)) if found else ("", ())
        order = (layout, sizes) if layout in LAYOUTS else _AS_IT_IS
        read = [self._part(entry, order) for entry in parts]
        if all(isinstance(part, StoredWeight) for part in read):
            stored = _joined_stored(name, [p for p in read if isinstance(p, StoredWeight)])
            plain = not layout or layout in LAYOUTS or (layout == "latent" and len(parts) == 1)
            if stored is not None and plain and self._fits(parts, dims):
                return stored
            self.floats.append(parts[0].name)
        floats = [
            part.values(f"{name}.{index}") if isinstance(part, StoredWeight) else part
            for index, part in enumerate(read)
        ]
        return self._laid(name, floats, layout, dims)

    def _fits(self, parts: Sequence[Entry], dims: tuple[int, ...]) -> bool:
        """Whether tensors behind each other are a parameter of these dims; if not, its reader says
        so, but for an order of axes."""
        rows = sum(part.dims[-2] for part in parts)
        return (*parts[0].dims[:-2], rows, parts[0].dims[-1]) == dims or len(parts) == 1

    def _laid(
        self, name: str, parts: Sequence[Weight], layout: str, dims: tuple[int, ...]
    ) -> Weight:
        """Floats as the parameter is laid."""
        if not layout or layout in LAYOUTS:
            if len(parts) == 1:
                return parts[0].renamed(name)
            axis = -1 if name.endswith("bias") else -2
            shape = list(parts[0].type.shape)
            shape[axis] = sum(part.type.shape[axis] for part in parts)
            type = TensorType(parts[0].type.dtype, tuple(shape))
            cast = [part.cast(type.dtype) for part in parts]
            return derive(name, type, concatenated, *cast, dim=axis)
        if layout == "latent" and len(parts) == 1:
            return parts[0].renamed(name)  # older files hold them as transformers does
        found = [part.cast(torch.float32) for part in parts]
        if prod(dims) != sum(prod(part.type.shape) for part in parts):
            raise InputError(
                f"{self.file.path}: tensor {parts[0].name} has the size "
                f"{list(parts[0].type.shape)}, and the metadata asks for {list(dims)}"
            )
        return derive(name, TensorType(torch.float32, dims), laid, *found, layout=layout, dims=dims)

    def _part(self, entry: Entry, order: Order) -> StoredWeight | Weight:
        """A tensor, its rows in transformers' order."""
        if order != _AS_IT_IS:
            _check_order(self.file, entry, *order)
        if entry.kind in FLOATS:
            return floats_of(self.file, entry, order)
        raw = _rows(self.file, entry, order)
        kind = TYPES.get(entry.kind)
        if kind is None:
            self.others.append(f"{entry.name} (type {entry.kind})")
            return _eight_bits(self.file, entry, raw)
        if len(entry.dims) < 2:
            raise InputError(
                f"{self.file.path}: tensor {entry.name} has the size {list(entry.dims)}; blocks "
                f"are in rows"
            )
        return _stored(self.file, entry, kind, raw)

    def _warn(self) -> None:
        """Warn of what is not as it is in the file."""
        for names, what in (
            (
                self.others,
                f"of types without a form of their own are kept in {EIGHT.brief}",
            ),
            (self.floats, "of few bits that are laid in another way are dequantized"),
        ):
            if names:
                warnings.warn(
                    f"{self.file.path}: {len(names)} tensors {what}: {names[0]}",
                    GraftworkWarning,
                    stacklevel=2,
                )


def _itself(weight: Weight) -> Weight:
    return weight


def _joined_stored(name: str, parts: Sequence[StoredWeight]) -> StoredWeight | None:
    """Weights behind each other along their outputs; None if they are stored in different ways."""
    if len(parts) == 1:
        return parts[0]
    if len({part.numeric for part in parts}) > 1 or parts[0].codebook is not None:
        return None

    def joined(part: str) -> Weight | None:
        given = [w for p in parts if (w := getattr(p, part)) is not None]
        if not given:
            return None
        shape = list(given[0].type.shape)
        shape[-2] = sum(w.type.shape[-2] for w in given)
        type = TensorType(given[0].type.dtype, tuple(shape))
        return derive(f"{name}.{part}", type, concatenated, *given, dim=-2)

    weight, scale = joined("weight"), joined("scale")
    assert weight is not None and scale is not None
    return replace(parts[0], weight=weight, scale=scale, offset=joined("offset"))


def _pairs(rows: int, heads: int) -> torch.Tensor:
    """The file has rows 2i and 2i+1 of a head side by side, transformers i and i + half."""
    return torch.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _grouped(rows: int, groups: int, each: int, dim: int) -> torch.Tensor:
    """The file has all queries, all keys and all values, transformers those of one group of heads
    after the other. each: queries of a group. dim: rows of a head."""
    queries, keys, values = torch.arange(rows).split(
        [groups * each * dim, groups * dim, groups * dim]
    )
    parts = [queries.reshape(groups, each * dim), keys.reshape(groups, dim)]
    return torch.cat([*parts, values.reshape(groups, dim)], 1).flatten()


LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {"pairs": _pairs, "grouped": _grouped}
"""Orders of rows: for so many of them and the layout's sizes, which row of the file goes where."""


def _check_order(file: GgufFile, entry: Entry, layout: str, sizes: tuple[int, ...]) -> None:
    """Errors: `InputError` for rows that cannot be in such an order."""
    rows = entry.dims[0]
    if layout == "pairs":
        fine = sizes[0] >= 1 and rows % (2 * sizes[0]) == 0
    else:
        groups, each, dim = sizes
        fine = rows == groups * (each + 2) * dim
    if not fine:
        of = " x ".join(map(str, sizes))
        raise InputError(
            f"{file.path}: tensor {entry.name} has {rows} rows, which are no {layout} of {of}"
        )


@derivation
def laid(*parts: torch.Tensor, layout: str, dims: tuple[int, ...]) -> torch.Tensor:
    """Floats as transformers has them, [dims], that the format keeps in another way."""
    if layout == "interleaved":  # gate and up, of which transformers has columns in turns
        both = torch.stack(parts, 2).flatten(1, 2)
        return both.transpose(1, 2).reshape(dims) if both.dim() == 3 else both.reshape(dims)
    if layout == "latent":  # of each head its keys' rows, which lie the other way, then its values'
        keys = parts[0].transpose(1, 2)
        return torch.cat([keys, *parts[1:]], 1).reshape(dims)
    (x,) = parts
    if layout == "transposed":
        return x.transpose(-1, -2).reshape(dims).contiguous()
    if layout == "less one":
        return x - 1.0
    if layout == "log of minus":
        return torch.log(-x).reshape(dims)
    return x.reshape(dims)


def width_of(file: GgufFile, entry: Entry) -> int:
    """Bytes of a row of a tensor. Errors: `InputError` for parts of blocks, `UnsupportedError` for
    types that not even the package knows."""
    columns = entry.dims[-1]
    if entry.kind in FLOATS:
        return columns * FLOATS[entry.kind].itemsize
    values, size = _block(file, entry)
    if columns % values:
        raise InputError(
            f"{file.path}: tensor {shown(entry.name)} has the size {list(entry.dims)}; its type "
            f"{entry.kind} has rows of blocks of {values} values"
        )
    return columns // values * size


def _block(file: GgufFile, entry: Entry) -> tuple[int, int]:
    """Values and bytes of a block of a tensor's type."""
    if (kind := TYPES.get(entry.kind)) is not None:
        return kind.values, kind.size
    import gguf

    try:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{file.path}: tensor {shown(entry.name)} has the block type {entry.kind}, which the "
            f"package gguf does not know"
        ) from error
    return int(values), int(size)


def _rows(file: GgufFile, entry: Entry, order: Order = _AS_IT_IS) -> Weight:
    """The bytes of a tensor's rows u8[R,W]; a vector's rows are its values."""
    held = entry
    if len(entry.dims) == 1 and entry.kind in FLOATS:
        held = Entry(entry.name, (*entry.dims, 1), entry.kind, entry.start)
    width = width_of(file, held)
    type = TensorType(torch.uint8, (prod(held.dims[:-1]), width))
    return derive(
        entry.name,
        type,
        block_rows,
        file=file.owner(entry.name),
        entry=held,
        width=width,
        layout=order[0],
        sizes=order[1],
    )


@derivation
def block_rows(
    *, file: GgufFile, entry: Entry, width: int, layout: str, sizes: tuple[int, ...]
) -> torch.Tensor:
    """The bytes u8[R,width] of a tensor's rows, in the order that a layout says (see `LAYOUTS`)."""
    rows = file.rows(entry, width)
    return rows[LAYOUTS[layout](len(rows), *sizes)] if layout else rows


def floats_of(file: GgufFile, entry: Entry, order: Order = _AS_IT_IS) -> Weight:
    """A tensor of floats, its rows in an order."""
    dtype, raw = FLOATS[entry.kind], _rows(file, entry, order)
    type = TensorType(dtype, entry.dims)
    return derive(entry.name, type, bytes_as, raw, dtype=dtype, dims=entry.dims)


@derivation
def bytes_as(rows: torch.Tensor, *, dtype: torch.dtype, dims: tuple[int, ...]) -> torch.Tensor:
    """Bytes u8[R,W] as the numbers that they are."""
    return rows.view(dtype).reshape(dims)


def _stored(file: GgufFile, entry: Entry, kind: BlockType, raw: Weight) -> StoredWeight:
    """A tensor of blocks, decoded part by part when they are loaded."""
    *stack, rows, columns = entry.dims
    numeric = kind.numeric
    packed, scale = (
        TensorType(type.dtype, (*stack, *type.dims)) for type in numeric.types(rows, columns)
    )
    options: dict[str, Any] = {"kind": entry.kind, "rows": (*stack, rows)}
    scales = derive(f"{raw.name}.scale", scale, block_part, raw, part="scales", **options)
    offsets = None
    if kind.offsets is not None:
        offsets = derive(f"{raw.name}.offset", scale, block_part, raw, part="offsets", **options)
    for part in filter(None, (scales, offsets)):
        if not torch.isfinite(part.load().float()).all():
            raise InputError(f"{file.path}: tensor {raw.name} has scales that are not finite")
    book = torch.tensor(kind.codebook, dtype=torch.float32) if kind.codebook else None
    return StoredWeight(
        numeric,
        derive(f"{raw.name}.bits", packed, block_part, raw, part="codes", **options),
        scales,
        offsets,
        None if book is None else Weight.of(f"{kind.name}.codebook", book),
    )


@derivation
def block_part(
    blocks: torch.Tensor, *, kind: int, rows: tuple[int, ...], part: str
) -> torch.Tensor:
    """The scales, offsets or codes [*rows,...] of blocks u8[R,W] of a type; codes are packed."""
    type = TYPES[kind]
    found: torch.Tensor = getattr(type, part)(blocks.reshape(-1, type.size)).reshape(*rows, -1)
    return pack(found, type.bits) if part == "codes" else found


def _eight_bits(file: GgufFile, entry: Entry, raw: Weight) -> StoredWeight:
    """A tensor of another type, rounded to 8 bits. Errors: `UnsupportedError` for a type that the
    package cannot unpack."""
    import gguf

    kind = gguf.GGMLQuantizationType(entry.kind)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{file.path}: tensor {shown(entry.name)} has the block type {kind.name}, which the "
            f"package gguf cannot unpack"
        ) from error
    *stack, rows, columns = entry.dims
    floats = derive(
        entry.name,
        TensorType(torch.float32, entry.dims),
        dequantized_blocks,
        raw,
        kind=entry.kind,
        dims=entry.dims,
    )
    packed, scale = (
        derive(
            f"{entry.name}.{part}",
            TensorType(type.dtype, (*stack, *type.dims)),
            eight_bits,
            floats,
            part=part,
        )
        for part, type in zip(("weight", "scale"), EIGHT.types(rows, columns), strict=True)
    )
    return StoredWeight(EIGHT, packed, scale)


@derivation
def eight_bits(values: torch.Tensor, *, part: str) -> torch.Tensor:
    """The codes or scales of values f32[...,N,K] in the form `EIGHT`."""
    stored = EIGHT.quantize(values.reshape(-1, values.shape[-1]))
    found: torch.Tensor = getattr(stored, part)
    return found.reshape(*values.shape[:-1], -1)


@derivation
def dequantized_blocks(rows: torch.Tensor, *, kind: int, dims: tuple[int, ...]) -> torch.Tensor:
    """What rows of blocks u8[R,W] stand for, by the package."""
    import gguf

    values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).reshape(dims)
