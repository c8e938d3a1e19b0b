"""Export of quantized weights as a compressed-tensors checkpoint, for transformers and vLLM.

    config.json          the model's, with a quantization_config
    model.safetensors    <module>.weight_packed, .weight_scale, .weight_shape, ... of quantized
                         layers, and the other parameters
    tokenizer.json, ...  the model's files

Codes, scales and integer zero points are unchanged, so the weights are the same bit for bit. Merged
products are split by module, stacks of experts into single experts. Names are those of the model's
checkpoints. `config.json` records which products quantize activations.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch import nn

from ..artifact.shards import SHARD_BYTES, plan_shards, write_weights
from ..frontends.huggingface import CheckpointNames, without_data
from ..frontends.huggingface.names import Piece
from ..ir import (
    GraftworkWarning,
    InputError,
    Program,
    TensorType,
    UnsupportedError,
    Weight,
    arguments,
    type_of,
)
from ..ir.ops.quantized import LOOK_UPS
from ..ir.plan.contract import Contract
from ..ir.rewrite.stored import are_weights, values_of
from ..ir.support.files import LARGE, read_bytes, read_json
from ..ir.support.scratch import replacing
from ..ir.weights import Call
from ..passes.engine.base import Effect, all_passes
from .compressed_layout import BYTES, Scheme, stored
from .parameters import STACKS, Parameters, Rows

A, G = torch.ops.aten, torch.ops.graftwork
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def export_compressed_tensors(program: Program, folder: Path) -> Path:
    """Write the folder, without drafters; returns it.

    Warns (`GraftworkWarning`) of what the recipe changes besides weights, which is left out too.
    Errors: `UnsupportedError` for weights that the format cannot represent (codebooks, offsets that
    are no multiple of the scale, permuted channels), `InputError` for a program without config.json
    or without quantized weights.
    """
    if CONFIG not in program.assets:
        raise InputError(
            f"{program.name} came without a config.json, which the export needs: optimize the "
            f"folder of a checkpoint instead of a model in memory"
        )
    hidden = type_of(program.step.calls(G.hidden.default)[0]).dtype
    twin = without_data(program.assets[CONFIG].parent, hidden)
    writer = _Checkpoint(program, twin, CheckpointNames(twin))
    weights = writer.weights()
    if left := _left_out(program):
        warnings.warn(
            f"a checkpoint holds weights: {', '.join(left)} {'is' if len(left) == 1 else 'are'} "
            f"left out, and whoever loads it decodes without",
            GraftworkWarning,
            stacklevel=3,
        )
    config = {**read_json(program.assets[CONFIG]), **writer.config(hidden)}
    with replacing(folder) as new:
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write(new, weights)
        for name, source in program.assets.items():
            if name != CONFIG:
                (new / name).write_bytes(read_bytes(source, LARGE))
    return folder


def _left_out(program: Program) -> list[str]:
    """Passes that change what is written to a text by other means than weights."""
    passes = {record.name: all_passes()[record.name] for record in program.provenance}
    return [
        name
        for name, made in passes.items()
        if made.contract is Contract.APPROXIMATE and made.effects - {Effect.WEIGHT_NUMERICS}
    ]


def _write(folder: Path, weights: list[Weight]) -> None:
    files = write_weights(folder, weights, stem="model")
    if len(files) == 1:
        return
    shards = zip(files, plan_shards(weights, SHARD_BYTES), strict=True)
    where = {weight.name: file.name for file, shard in shards for weight in shard}
    index = {"metadata": {"total_size": sum(w.type.nbytes for w in weights)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


class _Loaded:
    """Cache of the last `count` loaded stacks, because experts are written one by one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[str, torch.Tensor] = {}

    def piece(self, stack: Weight, place: Piece, name: str) -> Weight:
        """An expert's rows of a stack [E,R,...]."""
        dims = (place.stop - place.start, *stack.type.dims[2:])

        def load() -> torch.Tensor:
            tensor = self.held.pop(stack.name, None)
            self.held[stack.name] = stack.load() if tensor is None else tensor
            while len(self.held) > self.count:
                del self.held[next(iter(self.held))]
            return self.held[stack.name][place.expert, place.start : place.stop].clone()

        return Weight(name, TensorType(stack.type.dtype, dims), Call(load))


@dataclass
class _Checkpoint(Parameters):
    """The tensors of a model's checkpoint. names: of parameters there."""

    names: CheckpointNames
    schemes: dict[str, Scheme] = field(default_factory=dict)
    floats: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    """Modules with products in floats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loaded = _Loaded(4)  # weight, scale and offset, and the next weight

    def weights(self) -> list[Weight]:
        """All tensors of the checkpoint. Errors: see `export_compressed_tensors`."""
        found: list[Weight] = []
        done: set[int] = set()
        parameters = self.twin.state_dict(keep_vars=True)
        for name, tensor in parameters.items():
            owner, _, part = name.rpartition(".")
            if id(tensor) in done and owner not in self.held:
                continue  # tied to another
            made = list(self._parameter(owner, part, name, TensorType.of(tensor)))
            found += made
            done.add(id(tensor))
        if not self.schemes:
            raise InputError(
                f"{self.program.name} has no layer of few bits, which the format is for; choose a "
                f"recipe that quantizes (int4 with quantize_weights.symmetric=true)"
            )
        if self.floats:
            warnings.warn(
                f"the format has no tables in few bits: {', '.join(self.floats)} become floats",
                GraftworkWarning,
                stacklevel=3,
            )
        return found

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Entries that are added to the model's config.json."""
        groups: dict[Scheme, list[str]] = {}
        for module, scheme in self.schemes.items():
            groups.setdefault(scheme, []).append(module)
        linear = [n for n, module in self.twin.named_modules() if isinstance(module, nn.Linear)]
        ignored = [name for name in linear if name not in self.schemes]
        ignored += [name for name in self.plain if name not in ignored]
        if len(groups) == 1:
            groups = {scheme: ["Linear"] for scheme in groups}
        formats = {scheme.format for scheme in groups}
        entry = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": scheme.described(names)
                for i, (scheme, names) in enumerate(groups.items())
            },
            "ignore": ignored,
        }
        tied = {"tie_word_embeddings": False} if self._head_differs() else {}
        return {"quantization_config": entry, "dtype": str(dtype).removeprefix("torch."), **tied}

    def _head_differs(self) -> bool:
        """Whether a head that is tied to the embedding is quantized."""
        head = self.twin.get_output_embeddings()  # type: ignore[operator]
        names = {id(module): name for name, module in self.twin.named_modules()}
        return names.get(id(head)) in self.schemes

    def _parameter(self, owner: str, part: str, name: str, type: TensorType) -> Iterator[Weight]:
        rows = self.held.get(owner)
        if owner in self.mixtures and part in STACKS:
            yield from self._experts(self.mixtures[owner], name, STACKS[part], type)
        elif rows is not None and part == "bias":
            yield self.bias(rows, name).renamed(self.names.of(name))
        elif rows is not None and part == "weight" and rows.node.target in LOOK_UPS:
            yield self._table(rows, name, type)
        elif rows is not None and part == "weight":
            yield from self._product(rows, owner, type)
        else:
            yield self._plain(name, type)

    def _plain(self, name: str, type: TensorType) -> Weight:
        return self.named(name, type).renamed(self.names.of(name))

    def _table(self, rows: Rows, name: str, type: TensorType) -> Weight:
        if rows.node.target is A.embedding.default:
            return self._plain(name, type)
        self.floats.append(name)
        values = values_of(rows.node, self.program.weights).cast(type.dtype)
        return values.renamed(self.names.of(name))

    def _product(self, rows: Rows, owner: str, type: TensorType) -> Iterator[Weight]:
        given = arguments(rows.node)
        if rows.node.target is A.linear.default:
            name = self.names.of(f"{owner}.weight")
            weight = rows.of(self.program.weights[str(given["weight"].target)], name)
            if weight.type.dims != type.dims:
                raise UnsupportedError(f"{owner}.weight: expected {type}, got {weight.type}")
            self.plain.append(name.removesuffix(".weight"))
            yield weight
            return
        self._check(rows, owner, type)
        parts = [
            None if part is None else rows.of(part, f"{owner}.part")
            for part in self.parts(rows.node, "")
        ]
        group = 0 if given["group"] == type.dims[1] else given["group"]
        scheme = Scheme(given["bits"], group, parts[2] is None, given["rounded"], given["span"])
        self.schemes[owner] = scheme
        name = self.names.of(f"{owner}.weight").removesuffix(".weight")
        yield from stored(name, parts, scheme.bits, scheme.format == BYTES, type.shape)

    def _experts(
        self, node: torch.fx.Node, name: str, stack: str, type: TensorType
    ) -> Iterator[Weight]:
        """The experts' weights of a stacked parameter [E,R,K]."""
        given = arguments(node)
        experts, rows, columns = self._laid(node, name, stack, type)
        pieces = self.names.pieces(name, experts, rows)
        if node.target is G.moe.default:
            whole = self.program.weights[str(given[stack].target)]
            for piece in pieces:
                self.plain.append(piece.name.removesuffix(".weight"))
                yield self.loaded.piece(whole, piece, piece.name)
            return
        group = given["group" if stack == "gate_up" else "down_group"]
        stacked = self.parts(node, stack)
        by_channel = 0 if group == columns else group
        scheme = Scheme(
            given["bits"], by_channel, stacked[2] is None, given["rounded"], given["span"]
        )
        for piece in pieces:
            module = piece.name.removesuffix(".weight")
            self.schemes[module] = scheme
            parts = [
                None if part is None else self.loaded.piece(part, piece, f"{module}.part")
                for part in stacked
            ]
            shape = piece.stop - piece.start, columns
            yield from stored(module, parts, scheme.bits, scheme.format == BYTES, shape)

    def _laid(
        self, node: torch.fx.Node, name: str, stack: str, type: TensorType
    ) -> tuple[int, int, int]:
        """Experts, rows and columns of a stack. Errors: `UnsupportedError` for another layout in
        the model, or a computed weight."""
        module: Any = self.twin.get_submodule(name.rpartition(".")[0])
        plain = node.target is G.moe.default
        named = (stack,) if plain else (stack, f"{stack}_scale", f"{stack}_offset")
        operands = [arguments(node)[one] for one in named]
        reason = ""
        if any(one is not None and one.op != "get_attr" for one in operands):
            reason = "the program computes it"
        elif module.is_transposed or not module.is_concatenated:
            reason = "the model has its rows or columns in another order than the program"
        elif not plain and operands[1].meta["type"].dims[:2] != type.dims[:2]:
            reason = f"it is {operands[1].meta['type']} of scales, and the model has {type}"
        if reason:
            raise UnsupportedError(
                f"{name} cannot be written as compressed-tensors: {reason}; exclude the experts "
                f"(quantize_weights.exclude), or export another recipe"
            )
        experts, rows, columns = type.shape
        return experts, rows, columns

    def _check(self, rows: Rows, owner: str, type: TensorType) -> None:
        """Errors: `UnsupportedError` for weights that the format cannot represent."""
        node, given = rows.node, arguments(rows.node)
        module = self.twin.get_submodule(owner)
        have = (rows.stop - rows.start, int(str(given["scale"].meta["type"].dims[1])))
        have = (have[0], have[1] * given["group"])
        source = given["x"]
        reason = ""
        if not isinstance(module, nn.Linear):
            kind = module.__class__.__name__
            every = ".".join("*" if part.isdigit() else part for part in owner.split("."))
            reason = f"it is of a {kind}, no Linear (quantize_weights.exclude=['{every}.weight'])"
        elif have != type.dims:
            reason = f"it is [{have[0]},{have[1]}], and its {module.__class__.__name__} {type}"
        elif not are_weights(node):
            reason = "the program computes it"
        elif given["codebook"] is not None:
            reason = "it has a codebook"
        elif source.target is A.index_select.default and source.args[2].op == "get_attr":
            reason = "its input channels are in the order of their groups (GPTQ's activation order)"
        if reason:
            raise UnsupportedError(
                f"{owner}.weight cannot be written as compressed-tensors: {reason}; export another "
                f"recipe, or quantize the original"
            )
