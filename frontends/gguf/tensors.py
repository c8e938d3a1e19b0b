"""The tensors of a GGUF file as the parameters of a model of transformers.

Parameters get the format's names by the `gguf` package's table, and `JOINED` has those that the
format keeps in several tensors. Blocks become `StoredWeight`s without a float detour, also where
rows or columns are kept in another order. What is laid in another way is dequantized, and what is
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

import torch
from torch import nn

from ...ir import (
    GraftworkWarning,
    InputError,
    TensorType,
    UnsupportedError,
    Weight,
    derive,
)
from ...ir.support.names import shown
from ..huggingface.checkpoint import Tensors, concatenated
from ..stored_weights import StoredWeight
from .architectures import Architecture
from .blocks import EIGHT, FLOATS, TYPES
from .layouts import Order, in_order, laid
from .metadata import Metadata
from .reader import Entry, GgufFile
from .rows import floats_of, stored_blocks, stored_in_eight

JOINED: Mapping[str, tuple[str, ...]] = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    "kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
    "in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
}
"""The ends of parameters' names, and the tensors of the layer that they are made of, one behind the
other along a layer's outputs."""

_RENAMED = {
    r"\.dt_bias$": ".dt_proj.bias",
    r"\.sinks$": ".sinks.weight",
    r"\.e_score_correction_bias$": ".e_score_correction.bias",
}
"""Ends of parameters' names, and what the package's table knows them by."""


def names_of(
    spoken: str, layers: int, there: Callable[[str], bool]
) -> Callable[[str], tuple[str, ...]]:
    """The file's names of what a parameter is made of; none: it has no place in the format.

    spoken: general.architecture. there: whether a file that has a parameter in several tensors has
    this one, the first of them.
    """
    import gguf

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == spoken)
    table = gguf.get_tensor_name_map(arch, layers)

    def names(parameter: str) -> tuple[str, ...]:
        layer = re.search(r"\.(\d+)\.", parameter)
        for end, parts in JOINED.items():
            found = tuple(f"blk.{layer[1] if layer else 0}.{part}" for part in parts)
            if parameter.endswith(f".{end}") and there(found[0]):
                return found
        ends = (".weight", ".bias")
        for end, theirs in _RENAMED.items():
            parameter = re.sub(end, theirs, parameter)
        for known in (parameter, parameter.removeprefix("transformer.")):
            if (named := table.get_name(known, try_suffixes=ends)) is not None:
                return (str(named),)
        return ()

    return names


_DIVISORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def passed_over(file: GgufFile) -> set[str]:
    """Tensors that no parameter is made of: what frequencies are divided by, and layers that
    predict later tokens."""
    meta = Metadata(file)
    later = tuple(f"blk.{layer}." for layer in range(meta.layers, meta.number("block_count", int)))
    return {name for name in file.tensors if name in _DIVISORS or name.startswith(later)}


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
        names = names_of(
            str(self.file.metadata.get("general.architecture")),
            self.config.num_hidden_layers,
            self.file.tensors.__contains__,
        )
        for name, parameter in twin.state_dict(keep_vars=True).items():
            parts = [self.file.tensors[n] for n in names(name) if n in self.file.tensors]
            if not parts or len(parts) < len(names(name)):
                continue
            for part in parts:
                left.pop(part.name, None)
            weight = self.weight(name, parts, tuple(parameter.shape))
            if isinstance(weight, StoredWeight):
                kept[name] = weight
                weight = weight.values(name)
            tensors[name] = partial(_itself, weight)
        if strange := sorted(left.keys() - passed_over(self.file)):
            raise UnsupportedError(
                f"{self.file.path}: {len(strange)} tensors are none that a {type(twin).__name__} "
                f"has here: {shown(strange[0])}"
            )
        self._warn()
        return tensors, kept

    def weight(
        self, name: str, parts: Sequence[Entry], dims: tuple[int, ...]
    ) -> StoredWeight | Weight:
        """A parameter of these dims, of one tensor or several."""
        layout, _ = self.known.layout_of(name, self.config, len(parts))
        order = self.known.order_of(name, self.config, len(parts))
        self._check_order(parts, order)
        read = [self._part(entry) for entry in parts]
        if all(isinstance(part, StoredWeight) for part in read):
            stored = _joined_stored(name, [p for p in read if isinstance(p, StoredWeight)])
            if stored is not None and not layout and self._fits(parts, dims):
                stored = stored if order is None else _ordered_stored(stored, order)
                if stored is not None:
                    return stored
            self.floats.append(parts[0].name)
        floats = [
            part.values(f"{name}.{index}") if isinstance(part, StoredWeight) else part
            for index, part in enumerate(read)
        ]
        return self._laid(name, floats, layout, order, dims)

    def _fits(self, parts: Sequence[Entry], dims: tuple[int, ...]) -> bool:
        """Whether tensors behind each other are a parameter of these dims; if not, its reader says
        so, but for an order of axes."""
        rows = sum(part.dims[-2] for part in parts)
        return (*parts[0].dims[:-2], rows, parts[0].dims[-1]) == dims or len(parts) == 1

    def _check_order(self, parts: Sequence[Entry], order: Order | None) -> None:
        """Errors: `InputError` for rows or columns that cannot be in such an order."""
        if order is None:
            return
        count = sum(part.dims[order.axis] for part in parts if len(part.dims) > order.axis)
        if not order.fits(count):
            of = " x ".join(map(str, order.sizes))
            raise InputError(
                f"{self.file.path}: tensor {parts[0].name} has {count} "
                f"{('rows', 'columns')[order.axis]}, which are no {order.kind} of {of}"
            )

    def _laid(
        self,
        name: str,
        parts: Sequence[Weight],
        layout: str,
        order: Order | None,
        dims: tuple[int, ...],
    ) -> Weight:
        """Floats as the parameter is laid."""
        if not layout and len(parts) > 1:
            axis = -1 if name.endswith("bias") else -2
            parts = [_joined([part.cast(parts[0].type.dtype) for part in parts], name, axis)]
        if order is not None:
            parts = [_ordered(part, order) for part in parts]
        if not layout:
            return parts[0].renamed(name)
        found = [part.cast(torch.float32) for part in parts]
        if prod(dims) != sum(prod(part.type.shape) for part in parts):
            raise InputError(
                f"{self.file.path}: tensor {parts[0].name} has the size "
                f"{list(parts[0].type.shape)}, and the metadata asks for {list(dims)}"
            )
        return derive(name, TensorType(torch.float32, dims), laid, *found, layout=layout, dims=dims)

    def _part(self, entry: Entry) -> StoredWeight | Weight:
        if entry.kind in FLOATS:
            return floats_of(self.file, entry)
        kind = TYPES.get(entry.kind)
        if kind is None:
            self.others.append(f"{entry.name} (type {entry.kind})")
            return stored_in_eight(self.file, entry)
        if len(entry.dims) < 2:
            raise InputError(
                f"{self.file.path}: tensor {entry.name} has the size {list(entry.dims)}; blocks "
                f"are in rows"
            )
        return stored_blocks(self.file, entry, kind)

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

    found: dict[str, Any] = {
        part: _joined([getattr(p, part) for p in parts], f"{name}.{part}", -2)
        for part in _parts_of(parts[0])
    }
    return replace(parts[0], **found)


def _ordered_stored(stored: StoredWeight, order: Order) -> StoredWeight | None:
    """A weight in transformers' order; None if it cuts through groups of columns with one scale."""
    parts = _parts_of(stored)
    if not all(order.fits(part.type.shape[order.axis]) for part in parts.values()):
        return None
    ordered: dict[str, Any] = {name: _ordered(part, order) for name, part in parts.items()}
    return replace(stored, **ordered)


def _parts_of(stored: StoredWeight) -> dict[str, Weight]:
    """What a stored weight has for each row."""
    named = {"weight": stored.weight, "scale": stored.scale, "offset": stored.offset}
    return {name: part for name, part in named.items() if part is not None}


def _joined(parts: Sequence[Weight], name: str, axis: int) -> Weight:
    shape = list(parts[0].type.shape)
    shape[axis] = sum(part.type.shape[axis] for part in parts)
    type = TensorType(parts[0].type.dtype, tuple(shape))
    return derive(name, type, concatenated, *parts, dim=axis)


def _ordered(weight: Weight, order: Order) -> Weight:
    return derive(f"{weight.name}.ordered", weight.type, in_order, weight, order=order)
