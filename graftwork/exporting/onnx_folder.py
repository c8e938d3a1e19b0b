"""Export of decode graphs: an ONNX folder, and one for onnxruntime-genai.

    model.onnx          input_ids i64[B,T], attention_mask i64[B,P] (0: padding, anywhere),
                        past_key_values.<i>.key and .value [B,G,P-T,D]
                        -> logits [B,T,V], present.<i>.key and .value [B,G,P,D]
    model.onnx.data     its weights
    genai_config.json   (export_genai)
    generation_config.json, tokenizer.json, ... files that came with the model

Only ops of ONNX and ONNX Runtime are used. See `folder` for the other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as oir

from ..artifact.destinations import MARKS
from ..backends.onnxruntime.chains_in_graph import chain_of
from ..backends.onnxruntime.emit import OPSETS, emit
from ..backends.onnxruntime.portable import Layer, Portable, portable
from ..backends.onnxruntime.store import WeightFile, store
from ..ir import InputError, ModelInfo, Program, UnsupportedError
from ..ir.plan import NoDraft
from ..runtime.asking.options import SAMPLING
from .folder import (
    CARD,
    Card,
    Ops,
    check_ops,
    describe,
    refuse_other_states,
    write_folder,
    write_json,
)

MODEL, DATA, CONFIG = MARKS["onnx"], "model.onnx.data", "genai_config.json"
LEAST_OPSET = 23

# Conventional names of symbols in decode graphs.
_DIMS = {
    "B": "batch_size",
    "T": "sequence_length",
    "C": "past_sequence_length",
    "P": "total_sequence_length",
    "C+T": "total_sequence_length",
}

_USAGE = """
import numpy as np, onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
ids = np.array([[1, 2, 3]])  # the prompt's token ids, from tokenizer.json
feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
for value in session.get_inputs()[2:]:  # empty caches
    feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
logits, *present = session.run(None, feeds)  # feed present.* back as past_key_values.*
"""
_FILES = {
    MODEL: "the decode graph: input_ids, attention_mask and past_key_values.* to logits, present.*",
    DATA: "its weights, which the graph names by place",
}
_CARD = Card("decode graph in ONNX", _FILES, _USAGE)


def export_onnx(
    program: Program,
    folder: Path,
    *,
    plain: bool = False,
    qdq: bool = False,
    ops: Ops = "contrib",
    opset: int = OPSETS[""],
) -> Path:
    """Write the plain decode graph of a cached program; returns the folder.

    plain: leave the drafter out. qdq: quantized weights use ONNX's DequantizeLinear (4 or 8 bits)
    instead of ONNX Runtime's faster MatMulNBits (2, 4 or 8 bits). ops: "contrib" also uses ONNX
    Runtime's ops, such as GroupQueryAttention; "standard" only ONNX's, with concatenated caches.
    opset: version of ONNX's ops. Errors: `UnsupportedError` if the program drafts and `plain` is
    not set, if its step is more than a plain decode step (see `backends.onnxruntime.portable`), or
    for calls that the ops cannot express; `InputError` for an unknown opset.
    """
    check_opset(ops, opset)
    refuse_other_states(program)
    graph = portable(program, plain=plain, contrib=ops == "contrib")
    return _write(program, graph, folder, {}, _CARD, qdq=qdq, ops=ops, opset=opset)


def check_opset(ops: str, opset: int) -> None:
    """Errors: `InputError` for unknown ops or versions."""
    check_ops(ops)
    if not LEAST_OPSET <= opset <= OPSETS[""]:
        raise InputError(
            f"opset: expected {LEAST_OPSET} (the first with RMSNormalization and Attention) to "
            f"{OPSETS['']}, got {opset}"
        )


def export_genai(program: Program, folder: Path, *, plain: bool = False) -> Path:
    """Write a folder for onnxruntime-genai: the decode graph, its configuration, the tokenizer.

    A program that drafts by copying enables onnxruntime-genai's n-gram drafts (lossless, batch 1).
    plain and errors: as `export_onnx`, and `UnsupportedError` if layers differ in heads or widths,
    or for generation defaults that genai_config.json cannot represent.
    """
    refuse_other_states(program)
    draft, copying = program.plan.draft, {}
    known = chain_of(draft)
    if known is not None and known.genai is not None and not plain:
        copying = known.genai(draft)
        program = program.replace(plan=replace(program.plan, draft=NoDraft()))
    graph = portable(program, plain=plain)
    config = genai_config(program, graph) | copying
    usage = "import onnxruntime_genai as og\nmodel = og.Model('.')  # see its documentation"
    files = {**_FILES, CONFIG: "what onnxruntime-genai reads first"}
    card = Card("folder for onnxruntime-genai", files, usage)
    return _write(program, graph, folder, {CONFIG: config}, card)


def genai_config(program: Program, graph: Portable) -> dict[str, Any]:
    """The genai_config.json of a program."""
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
    """The checkpoint's generation defaults for genai_config.json, whose lengths include the prompt.
    Errors: `UnsupportedError` for others than it has."""
    defaults = info.defaults.supported
    if defaults.get("do_sample"):
        defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, **defaults}
    else:
        defaults = {name: value for name, value in defaults.items() if name not in SAMPLING}
    unknown = {name: defaults.pop(name, 0) for name in ("min_p", "min_new_tokens")}
    strange = [*info.defaults.unsupported]
    strange += [f"{name}={value}" for name, value in unknown.items() if value]
    if strange:
        raise UnsupportedError(
            f"the checkpoint's generation config asks for {', '.join(strange)}, which "
            f"onnxruntime-genai's configuration lacks: remove it from generation_config.json"
        )
    defaults.pop("max_new_tokens", None)  # has no equivalent; generation_config.json keeps it
    return {**defaults, "max_length": min(defaults.get("max_length", info.context), info.context)}


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
    card: Card,
    *,
    qdq: bool = False,
    ops: str = "contrib",
    opset: int = OPSETS[""],
) -> Path:
    # Refuses unsupported calls before anything is written.
    emitted = emit(
        graph.function,
        graph.weights,
        standard=True,
        qdq=qdq,
        contrib=ops == "contrib",
        opset=opset,
    )
    describe(program, emitted.model, f"One decode step of {program.name}; see {CARD}.")

    def fill(new: Path) -> None:
        _name_dims(emitted.model)
        store(emitted, new / MODEL, WeightFile(new / DATA))
        for name, content in extra.items():
            write_json(new / name, content)

    return write_folder(program, folder, fill, card, ours=MODEL)


def _name_dims(model: oir.Model) -> None:
    shapes = {f"present.{name}": value for name, value in _pasts(model)}
    for value in (*model.graph.inputs, *model.graph.outputs):
        present = shapes.get(value.name or "")
        value.shape = _renamed(value.shape if present is None else present, present is not None)


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
