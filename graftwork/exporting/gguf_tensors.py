"""The tensors of a GGUF file, of the weights of a program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ..frontends.gguf.blocks import FLOATS, encoded
from ..frontends.gguf.config import architecture_of
from ..frontends.gguf.layouts import LAID
from ..frontends.gguf.metadata import Metadata
from ..frontends.gguf.reader import GgufFile
from ..frontends.gguf.rows import width_of
from ..frontends.gguf.tensors import Reader, names_of, passed_over
from ..frontends.gguf.writing import row_of
from ..frontends.stored_weights import StoredWeight
from ..ir import TensorType, UnsupportedError, Weight, WeightStore, arguments
from ..ir.ops.numerics import PARTS, Numeric, Quantized
from ..ir.rewrite.stored import are_weights, group_of, named_parts, parts_of, stored_in
from .parameters import STACKS, Parameters, Rows

A, G = torch.ops.aten, torch.ops.graftwork
Held = Weight | StoredWeight
_NUMBERS = {dtype: number for number, dtype in FLOATS.items()}
_IN_FULL = re.compile(
    r".*(?<!\.weight)|.*norm.*|.*\.(ffn_gate_inp(_shexp)?|ssm_conv1d|shortconv\.conv)\.weight"
    r"|(position_embd|token_types)\.weight"
)
"""Tensors that llama.cpp keeps in float32."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model. dims: transformers'. names: of its tensors in the file. turned: the
    program has the rows [N,K] of a parameter [K,N]."""

    name: str
    dims: tuple[int, ...]
    names: tuple[str, ...]
    held: Held
    turned: bool


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file. kind: the number of its type. data: u8[...,W], its rows' bytes."""

    name: str
    kind: int
    data: torch.Tensor


@dataclass
class Tensors(Parameters):
    """The tensors of a program. spoken, row: the architecture. source: the GGUF file that the
    program came from, if it did. floats: tensors of weights of few bits that became floats."""

    floats: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        twin: Any = self.twin
        self.config: Any = twin.config
        self.source = self._source()
        self.reader = None
        self.spoken, self.row = row_of(self.program.info.model_type)
        if self.source is not None:
            meta = Metadata(self.source)
            self.spoken, self.row = meta.name, architecture_of(meta)
            self.reader = Reader(self.source, self.row, self.config)
        there = self.source.tensors.__contains__ if self.source else lambda name: True
        self.names = names_of(self.spoken, self.config.num_hidden_layers, there)

    def nodes(self) -> list[torch.fx.Node]:
        """Those of every function: none of them drafts."""
        return [node for fn in self.program.functions.values() for node in fn.graph.nodes]

    def parameters(self) -> list[Parameter]:
        """All that the file holds; what is tied once, if the program has it once.

        Errors: `UnsupportedError` for what the format has no place for, and for what is not found.
        """
        first: dict[int, Held] = {}
        made = []
        for name, tensor in self.twin.state_dict(keep_vars=True).items():
            held, turned = self._held(name, TensorType.of(tensor))
            if id(tensor) in first and _same(first[id(tensor)], held):
                continue
            first.setdefault(id(tensor), held)
            if not (names := self.names(name)):
                raise UnsupportedError(
                    f"GGUF's {self.spoken} models have no tensor for {name}: export baseline, or "
                    f"leave the weight out of what is quantized (quantize_weights.exclude)"
                )
            made.append(Parameter(name, tuple(tensor.shape), names, held, turned))
        self._check_used(made)
        return made

    def dims(self, parameters: list[Parameter]) -> dict[str, tuple[int, ...]]:
        """The sizes of the file's tensors."""
        found: dict[str, tuple[int, ...]] = {}
        for one in parameters:
            size = one.dims[::-1] if one.turned else one.dims
            parts = self._laid(one, torch.empty(size, device="meta"))
            found |= {n: tuple(part.shape) for n, part in zip(one.names, parts, strict=True)}
        return found

    def written(self, parameters: list[Parameter]) -> Iterator[Tensor]:
        """The tensors, loaded one after the other."""
        for one in parameters:
            yield from self._copied(one) or self._stored(one) or self._floats(one)
        for name in sorted(passed_over(self.source)) if self.source else ():
            yield self._raw(name)

    def _source(self) -> GgufFile | None:
        given = (getattr(weight.made, "kwargs", {}) for weight in self.known.values())
        files = (options.get("file") for options in given)
        paths = {file.path for file in files if isinstance(file, GgufFile) if file.metadata}
        heads = [path for path in paths if GgufFile.open(path).metadata.get("split.no", 0) == 0]
        return GgufFile.whole(heads[0]) if heads else None

    def _held(self, name: str, type: TensorType) -> tuple[Held, bool]:
        """A parameter as the program has it, and whether it is turned."""
        owner, _, part = name.rpartition(".")
        if owner in self.mixtures and part in STACKS:
            return self._stack(owner, STACKS[part], name, type), False
        rows = self.held.get(owner)
        if rows is not None and part == "bias":
            return self.bias(rows, name), False
        if rows is None or part != "weight" or arguments(rows.node)["weight"].op != "get_attr":
            return self.named(name, type), False
        turned = self.row.layout_of(name, self.config)[0] == "transposed"
        held = _of_call(rows.node, "weight", self.program.weights, rows, name)
        dims = held.dims if isinstance(held, StoredWeight) else held.type.dims
        if dims != (type.dims[::-1] if turned else type.dims):
            return self.named(name, type), False
        return held, turned

    def _stack(self, owner: str, stack: str, name: str, type: TensorType) -> Held:
        """The experts of a mixture, of which the model may have columns in another order."""
        node, module = self.mixtures[owner], self.twin.get_submodule(owner)
        if module.is_transposed or not module.is_concatenated:
            return self.named(name, type)
        return _of_call(node, stack, self.program.weights)

    def _check_used(self, made: list[Parameter]) -> None:
        """Errors: `UnsupportedError` for a product or table of few bits that is no parameter's."""
        used = {name for one in made for name in _names(one.held)}
        for node in self.nodes():
            for stack in stored_in(node):
                part = parts_of(node, stack)["weight"]
                weight = self.program.weights.get(str(part.target)) if part else None
                if weight is None or not used.intersection(_names(weight)):
                    raise UnsupportedError(
                        f"{part} is a weight of few bits that is no parameter of the model any "
                        f"more, and GGUF has no place for it: export another recipe"
                    )

    def _raw(self, name: str) -> Tensor:
        """A tensor of the source as it is."""
        assert self.source is not None
        entry = self.source.tensors[name]
        width = width_of(self.source, entry)
        data = self.source.owner(name).rows(entry, width)
        return Tensor(name, entry.kind, data.reshape(*entry.dims[:-1], width))

    def _copied(self, one: Parameter) -> list[Tensor]:
        """The source's tensors, if the program has what a reader makes of them."""
        if self.source is None or self.reader is None:
            return []
        entries = [self.source.tensors.get(name) for name in one.names]
        there = [entry for entry in entries if entry is not None]
        if len(there) < len(entries):
            return []
        read = self.reader.weight(one.name, there, one.dims)
        if not _same(read, one.held, turned=one.turned):
            return []
        return [self._raw(name) for name in one.names]

    def _stored(self, one: Parameter) -> list[Tensor]:
        """Blocks of exactly the bits that a weight has; none, if no type has them."""
        held = one.held
        layout, _ = self.row.layout_of(one.name, self.config, len(one.names))
        if not isinstance(held, StoredWeight) or held.order is not None:
            return []
        if (layout and not one.turned) or any(map(_IN_FULL.fullmatch, one.names)):
            return []
        book = None if held.codebook is None else held.codebook.load()
        loaded = [
            None if part is None else part.load() for part in (held.weight, held.scale, held.offset)
        ]
        order = self.row.order_of(one.name, self.config, len(one.names))
        if order and not all(t is None or order.fits(t.shape[order.axis]) for t in loaded):
            return []  # it cuts through groups of columns with one scale
        parts = [
            [None] * len(one.names) if tensor is None else self._laid(one, tensor)
            for tensor in loaded
        ]
        made = []
        for name, weight, scale, offset in zip(one.names, *parts, strict=True):
            found = encoded(held.numeric, Quantized(weight, scale, offset, book))
            if found is None:
                return []
            kind, blocks = found
            made.append(Tensor(name, kind, blocks.reshape(*weight.shape[:-1], -1)))
        return made

    def _floats(self, one: Parameter) -> list[Tensor]:
        """Floats of as few bits as hold all values."""
        held = one.held
        if isinstance(held, StoredWeight):
            self.floats.append(one.names[0])
            held = held.values(one.name)
        parts = self._laid(one, held.load())
        return [_narrow(name, part) for name, part in zip(one.names, parts, strict=True)]

    def _laid(self, one: Parameter, x: torch.Tensor) -> list[torch.Tensor]:
        """A parameter, or a part of its stored rows, as the file's tensors."""
        count = len(one.names)
        layout, sizes = self.row.layout_of(one.name, self.config, count)
        order = self.row.order_of(one.name, self.config, count)
        parts = [x] if order is None else order.written(x)
        if layout and not one.turned:
            full = [part if part.dtype.itemsize > 2 else part.float() for part in parts]
            return [laid for part in full for laid in LAID[layout].write(part, sizes)]
        if len(parts) == count:
            return parts
        return list(x.chunk(count, -1 if one.name.endswith("bias") else -2))


def _of_call(
    node: torch.fx.Node, stack: str, weights: WeightStore, rows: Rows | None = None, name: str = ""
) -> Held:
    """A weight of a call; rows: those of it alone. Errors: `UnsupportedError` if it is computed."""
    if not are_weights(node) or arguments(node)[stack].op != "get_attr":
        raise UnsupportedError(
            f"{node} computes its weights, which a GGUF file cannot hold: export another recipe"
        )
    if not stored_in(node):
        weight = weights[str(arguments(node)[stack].target)]
        return weight if rows is None else rows.of(weight, name)
    parts = named_parts(parts_of(node, stack), weights)
    if rows is not None:
        parts |= {
            part: rows.of(weight, f"{name}.{part}")
            for part, weight in parts.items()
            if part != "codebook"
        }
    bits = int(arguments(node)["bits"])
    kind = "affine" if "offset" in parts else "codebook" if "codebook" in parts else "symmetric"
    x = arguments(node).get("x")
    ordered = isinstance(x, torch.fx.Node) and x.target is A.index_select.default
    columns: Any = x.args[2] if x is not None and ordered else None
    return StoredWeight(
        Numeric(bits, group_of(node, stack), kind, parts["scale"].type.dtype),
        parts["weight"],
        parts["scale"],
        parts.get("offset"),
        parts.get("codebook"),
        order=None if columns is None else weights[str(columns.target)],
    )


def _names(held: Held) -> Iterator[str]:
    """Names of a weight and of what it is derived from."""
    weight = held.weight if isinstance(held, StoredWeight) else held
    yield weight.name
    for part in weight.inputs:
        yield from _names(part)


def _same(one: Held, other: Held, *, turned: bool = False) -> bool:
    """Whether two weights have the same bits; where one is floats, the same values. turned: the
    other has rows and columns exchanged."""
    if isinstance(one, StoredWeight) and isinstance(other, StoredWeight) and not turned:
        pairs = [(getattr(one, part), getattr(other, part)) for part in (*PARTS, "order")]
        return one.numeric == other.numeric and all(
            a is b if a is None or b is None else torch.equal(a.load(), b.load()) for a, b in pairs
        )
    values = [w.values("values") if isinstance(w, StoredWeight) else w for w in (one, other)]
    if isinstance(other, StoredWeight):
        return False
    first, second = values[0].cast(other.type.dtype).load(), values[1].load()
    return torch.equal(first.mT if turned else first, second)


def _narrow(name: str, x: torch.Tensor) -> Tensor:
    """Floats in the type of fewest bits that has all of them; float32 where llama.cpp wants it."""
    full = x.float()
    kinds: tuple[torch.dtype, ...] = (x.dtype, torch.bfloat16, torch.float16)
    if x.dim() < 2 or _IN_FULL.fullmatch(name):
        kinds = ()
    fits = (kind for kind in kinds if kind in _NUMBERS and _holds(kind, full))
    dtype = min(fits, key=lambda kind: kind.itemsize, default=torch.float32)
    return Tensor(name, _NUMBERS[dtype], full.to(dtype).contiguous().view(torch.uint8))


def _holds(kind: torch.dtype, x: torch.Tensor) -> bool:
    """Whether a dtype has all of the values; most that it does not have are told by the first."""
    return all(torch.equal(part.to(kind).float(), part) for part in x.split(64))
