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

from ...ir import InputError, ModelInfo, Program, UnsupportedError
from ...ir.support.names import shown
from ..generation import ASSETS, Known, defaults_of, nobody, read_object
from ..importer import import_exported
from ..program import build_program
from ..stored_weights import keep_stored
from ..trace import export, fake_mode
from .graph_module import GraphModule
from .reader import CONFIG, genai_config, model_file, read_model, section

_CONTEXT = 2048
"""Positions, where nothing says how many there are."""


def import_onnx(path: Path, dtype: torch.dtype | None = None, known: Known = nobody) -> Program:
    """A .onnx file, or a folder with one, as a program; weights stay in their files.

    dtype: of the floating weights; None: the file's. Weights of few bits stay as they are. known:
    see `import_model`. Errors: `InputError` for files that are missing, damaged or lead elsewhere,
    `UnsupportedError` naming the node and op of what cannot be imported.
    """
    file = model_file(path)
    model = read_model(file)
    folder, info = file.parent, _info(file, model)
    assets = {asset: folder / asset for asset in ASSETS if (folder / asset).is_file()}
    known(info, assets)
    mode = fake_mode()
    module = GraphModule(model.graph, mode, dtype or _dtype(model.graph))
    name = f"{file.name} ({info.model_type})"
    with mode:
        _run_once(module, name)
    exported = export(module, mode, info.context, name)
    imported = import_exported(exported, "", lambda key: module.weights[key])
    return keep_stored(build_program(info.model_type, imported, info, assets), module.stored)


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


def _info(file: Path, model: oir.Model) -> ModelInfo:
    """What is known of the model besides its graph."""
    folder, said = file.parent, _said(file, model)
    generation = {**said, **_json(folder / "generation_config.json")}

    def token(name: str) -> Any:
        found = generation.get(name)
        return said.get(name) if found is None else found

    eos = token("eos_token_id")
    return ModelInfo(
        model_type=str(said.get("model_type") or "onnx"),
        vocab_size=0,
        context=_whole(file, "context_length", said.get("context_length")) or _CONTEXT,
        eos=_several(file, "eos_token_id", eos),
        bos=_whole(file, "bos_token_id", token("bos_token_id")),
        pad=_whole(file, "pad_token_id", token("pad_token_id")),
        defaults=defaults_of(SimpleNamespace(**_json(folder / "generation_config.json"))),
    )


def _whole(file: Path, name: str, found: Any) -> int | None:
    """A whole number, if there is one. Errors: `InputError` for something else."""
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or not -1 <= found < 2**31:
        raise InputError(f"{file}: {name}: expected a whole number, got {shown(found)}")
    return found


def _several(file: Path, name: str, found: Any) -> tuple[int, ...]:
    given = found if isinstance(found, list) else [found]
    ids = [_whole(file, name, item) for item in given]
    return tuple(token for token in ids if token is not None)


def _said(file: Path, model: oir.Model) -> dict[str, Any]:
    """model_type, context_length and token ids, from the best source that there is."""
    folder = file.parent
    if (folder / CONFIG).is_file():
        said = section(genai_config(folder), "model")
        return {**said, "model_type": said.get("type")}
    kept: dict[str, Any] = {}
    for name, text in model.metadata_props.items():
        if name.endswith("_token_id") or name == "context_length":
            try:
                kept[name] = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{file}: its metadata says {name}={shown(text)}; expected a number"
                ) from error
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
    return read_object(path) if path.is_file() else {}
