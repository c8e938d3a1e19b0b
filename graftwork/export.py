"""Writes decode graphs for other loaders: an ONNX folder, and one that onnxruntime-genai runs.

    model.onnx          input_ids i64[B,T], attention_mask i64[B,P],
                        past_key_values.<i>.key and .value [B,G,P-T,D]
                        -> logits [B,T,V], present.<i>.key and .value [B,G,P,D]
    model.onnx.data     its weights
    genai_config.json   (export_genai)
    generation_config.json, tokenizer.json, ... files that came with the model

Kernels are ONNX's and ONNX Runtime's own; nothing of graftwork is needed to run it. Both functions
write beside the destination and rename, so that whoever looks sees the old folder, the new one, or
none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as oir

from .backends.onnxruntime.emit import emit
from .backends.onnxruntime.portable import Layer, Portable, portable
from .backends.onnxruntime.store import WeightFile, store
from .ir import InputError, ModelInfo, Program, UnsupportedError
from .ir.files import LARGE, read_bytes
from .ir.scratch import replacing
from .runtime.asking.options import SAMPLING

MODEL, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"
GENERATION = "generation_config.json"

# What our symbols are called in decode graphs elsewhere.
_DIMS = {
    "B": "batch_size",
    "T": "sequence_length",
    "C": "past_sequence_length",
    "P": "total_sequence_length",
    "C+T": "total_sequence_length",
}


def export_onnx(program: Program, folder: Path, *, plain: bool = False, qdq: bool = False) -> Path:
    """Write the plain decode graph of a cached program; returns the folder.

    plain: leave out what the program drafts with. qdq: weights of few bits go through ONNX's own
    DequantizeLinear (in 4 or 8 bits), which other runtimes know, too, instead of ONNX Runtime's
    MatMulNBits (2, 4 or 8), which is faster there. Errors: `UnsupportedError` if it drafts and that
    is not asked for, or if its step is more than a plain decode step (see
    `backends.onnxruntime.portable`); `InputError` if the folder holds something else.
    """
    return _write(program, portable(program, plain=plain), folder, {}, qdq=qdq)


def export_genai(program: Program, folder: Path, *, plain: bool = False) -> Path:
    """Write a folder for onnxruntime-genai: the decode graph, its configuration, the tokenizer.

    plain and errors: as `export_onnx`, and `UnsupportedError` if layers differ in their heads or
    widths, or for defaults of the checkpoint, which its configuration cannot say.
    """
    graph = portable(program, plain=plain)
    return _write(program, graph, folder, {CONFIG: genai_config(program, graph)})


def genai_config(program: Program, graph: Portable) -> dict[str, Any]:
    """What genai_config.json says of a program."""
    layer = _uniform(program, graph)
    info = program.info
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": MODEL,
        "head_size": layer.key_dim,
        "hidden_size": layer.heads * layer.key_dim,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.groups,
        "num_hidden_layers": len(graph.layers),
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    eos = list(info.eos) or [info.vocab_size]
    model: dict[str, Any] = {
        "type": "decoder",
        "vocab_size": info.vocab_size,
        "context_length": info.context,
        "eos_token_id": eos if len(eos) > 1 else eos[0],
        "pad_token_id": info.pad if info.pad is not None else eos[0],
        "decoder": decoder,
    }
    if info.bos is not None:
        model["bos_token_id"] = info.bos
    search = {"max_length": info.context, "num_beams": 1, "do_sample": False, **_search(info)}
    return {"model": model, "search": {**search, "past_present_share_buffer": graph.in_place}}


def _search(info: ModelInfo) -> dict[str, Any]:
    """The checkpoint's defaults as genai_config.json has them; lengths count the prompt there.

    Errors: `UnsupportedError` for one that it cannot say.
    """
    said = info.defaults.supported
    if said.get("do_sample"):
        said = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **said}
    else:
        said = {name: value for name, value in said.items() if name not in SAMPLING}
    unknown = {name: said.pop(name, 0) for name in ("min_p", "min_new_tokens")}
    strange = [*info.defaults.unsupported]
    strange += [f"{name}={value}" for name, value in unknown.items() if value]
    if strange:
        raise UnsupportedError(
            f"the checkpoint's generation config asks for {', '.join(strange)}, which "
            f"onnxruntime-genai's configuration cannot say: take it out of generation_config.json"
        )
    said.pop("max_new_tokens", None)  # its lengths count the prompt; generation_config.json has it
    return {**said, "max_length": min(said.get("max_length", info.context), info.context)}


def generation_config(info: ModelInfo) -> dict[str, Any]:
    """generation_config.json as transformers has it, for models that came without one."""
    eos = list(info.eos)
    tokens = {
        "bos_token_id": info.bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": info.pad,
    }
    known = {name: value for name, value in tokens.items() if value is not None}
    return {**known, **info.defaults.supported}


def _uniform(program: Program, graph: Portable) -> Layer:
    kinds = set(graph.layers)
    layer = graph.layers[0]
    if len(kinds) > 1 or layer.key_dim != layer.value_dim:
        raise UnsupportedError(
            f"{program.name} cannot be run by onnxruntime-genai, which wants the same heads and "
            f"widths in all layers and in keys and values; got {sorted(map(str, kinds))}. "
            f"Use export_onnx"
        )
    return layer


def _write(
    program: Program,
    graph: Portable,
    folder: Path,
    extra: Mapping[str, Any],
    *,
    qdq: bool = False,
) -> Path:
    _check_destination(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error}") from error
    with replacing(folder) as new:
        _write_model(graph, new, qdq)
        for name, content in extra.items():
            _write_json(new / name, content)
        for name, source in program.assets.items():
            if (new / name).exists():
                raise InputError(
                    f"the model brings a file {name!r}, which the export writes itself; "
                    f"rename it in the model's folder"
                )
            (new / name).write_bytes(read_bytes(source, LARGE))
        if GENERATION not in program.assets and program.info.defaults.supported:
            _write_json(new / GENERATION, generation_config(program.info))
    return folder


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_model(graph: Portable, folder: Path, qdq: bool) -> None:
    emitted = emit(graph.function, graph.weights, standard=True, qdq=qdq)
    shapes = {f"present.{name}": value for name, value in _pasts(emitted.model)}
    for value in (*emitted.model.graph.inputs, *emitted.model.graph.outputs):
        present = shapes.get(value.name or "")
        value.shape = _renamed(value.shape if present is None else present, present is not None)
    store(emitted, folder / MODEL, WeightFile(folder / DATA))


def _pasts(model: oir.Model) -> list[tuple[str, oir.Shape | None]]:
    prefix = "past_key_values."
    named = [(str(v.name), v.shape) for v in model.graph.inputs]
    return [(n.removeprefix(prefix), shape) for n, shape in named if n.startswith(prefix)]


def _renamed(shape: oir.Shape | None, present: bool) -> oir.Shape:
    """The shape in the names of `_DIMS`; a present cache has all rows."""
    dims = []
    for dim in shape or ():
        text = "P" if present and str(dim) == "C" else str(dim)
        dims.append(dim if isinstance(dim, int) else _DIMS.get(text, text))
    return oir.Shape(dims)


def _check_destination(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MODEL).exists():
        raise InputError(f"{folder} holds something else than an export; give an empty folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder")
