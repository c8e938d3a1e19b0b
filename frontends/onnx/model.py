"""Models in ONNX as programs: our exports, onnxruntime-genai's folders, torch.onnx's exports.

The graph becomes a module of torch ops (`graph_module`), which is traced like any other. Ids that
end a text, the context and the tokenizer come from genai_config.json, config.json, the files beside
the model, or what the graph says of itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as oir
import torch
from torch import nn

from ...ir import InputError, ModelInfo, Program, UnsupportedError
from ...ir.files import SMALL, read_bytes
from ..generation import ASSETS, defaults_of
from ..program import Source, build_program
from ..stored_weights import keep_stored
from ..trace import export, fake_mode
from .graph_module import GraphModule
from .reader import CONFIG, genai_config, model_file, read_model

_CONTEXT = 2048
"""Positions, where nothing says how many there are."""


def import_onnx(path: Path, dtype: torch.dtype | None = None) -> Program:
    """A .onnx file, or a folder with one, as a program; weights stay in their files.

    dtype: of the floating weights; None: the file's. Weights of few bits stay as they are. Errors:
    `InputError` for files that are missing, damaged or lead elsewhere, `UnsupportedError` naming
    the node and op of what cannot be imported.
    """
    file = model_file(path)
    model = read_model(file)
    folder = file.parent
    mode = fake_mode()
    module = GraphModule(model.graph, mode, dtype or _dtype(model.graph))
    info = _info(folder, model)
    name = f"{file.name} ({info.model_type})"
    with mode:
        _run_once(module, name)
    exported = export(_Wrapper(module), mode, info.context, name)
    assets = {asset: folder / asset for asset in ASSETS if (folder / asset).is_file()}
    source = Source(exported, "model", lambda key: module.weights[key])
    return keep_stored(build_program(info.model_type, source, info, assets), module.stored)


class _Wrapper(nn.Module):
    """Token ids and positions [B,T] to logits [B,T,V]."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, positions)
        return logits


def _run_once(module: GraphModule, name: str) -> None:
    """So that weights of few bits have parameters before a trace looks for them, and ops that are
    not known are named."""
    tokens = torch.zeros(2, 11, dtype=torch.long)
    try:
        module(tokens, torch.arange(11).expand(2, 11))
    except UnsupportedError as error:
        raise UnsupportedError(f"cannot import {name}: {error}") from error


def _dtype(graph: oir.Graph) -> torch.dtype:
    kinds = [v.const_value.dtype for v in graph.initializers.values() if v.const_value is not None]
    halves = {oir.DataType.FLOAT16: torch.float16, oir.DataType.BFLOAT16: torch.bfloat16}
    return next((halves[kind] for kind in kinds if kind in halves), torch.float32)


def _info(folder: Path, model: oir.Model) -> ModelInfo:
    """What is known of the model besides its graph."""
    said = _said(folder, model)
    generation = {**said, **_json(folder / "generation_config.json")}

    def token(name: str) -> Any:
        found = generation.get(name)
        return said.get(name) if found is None else found

    eos = token("eos_token_id")
    return ModelInfo(
        model_type=str(said.get("model_type") or "onnx"),
        vocab_size=0,
        context=int(said.get("context_length") or _CONTEXT),
        eos=tuple(eos) if isinstance(eos, list) else (() if eos is None else (int(eos),)),
        bos=token("bos_token_id"),
        pad=token("pad_token_id"),
        defaults=defaults_of(SimpleNamespace(**_json(folder / "generation_config.json"))),
    )


def _said(folder: Path, model: oir.Model) -> dict[str, Any]:
    """model_type, context_length and token ids, from the best source that there is."""
    if (folder / CONFIG).is_file():
        said = genai_config(folder).get("model", {})
        return {**said, "model_type": said.get("type")}
    kept = {}
    for name, text in model.metadata_props.items():
        if name.endswith("_token_id") or name == "context_length":
            kept[name] = json.loads(text)
        elif name == "model_type":
            kept[name] = text
    if kept:
        return kept
    config = _json(folder / "config.json")
    sizes = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    context = next((config[name] for name in sizes if config.get(name)), None)
    return {**config, "context_length": context}


def _json(path: Path) -> dict[str, Any]:
    """A JSON object in a file, nothing if it is not there. Errors: `InputError`."""
    if not path.is_file():
        return {}
    try:
        said = json.loads(read_bytes(path, SMALL))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(said, dict):
        raise InputError(f"{path}: expected an object")
    return said
