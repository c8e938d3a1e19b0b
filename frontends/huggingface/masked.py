"""Masked language models, which read a text both ways: encoders, and masked diffusion models.

What comes of one is a step in which all tokens see each other::

    func step(tokens: i64[B,T], positions: i64[B,T], lengths: i64[B]) -> logits f32[B,T,V] {
      %y = graftwork.source_attention(%q, %k, %v, %lengths, layer=0, scale=0.125)

Encoders are transformers' own (``...ForMaskedLM``). Diffusion models that were made from
autoregressive ones keep the names and shapes of their tensors, and say another `model_type`, whose
code transformers would fetch: they are read as what they were made from (`MADE_FROM`), with
attention to all tokens. No code of a folder runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...ir import InputError, Program, UnsupportedError, arguments, site_of
from ...ir.plan.inputs import INPUTS
from ...ir.support.tokenizer import refusing
from ..generation import ASSETS, read_object
from .families import LANGUAGE, MASKED
from .model import check_files, check_layers, check_settings, contents, import_tensors, read_config

G = torch.ops.graftwork

MADE_FROM = {
    "dream": "qwen2",
    "a2d-llama": "llama",
    "a2d-qwen2": "qwen2",
    "a2d-qwen3": "qwen3",
}
"""Diffusion models, by their `model_type` in small letters: Dream, DiffuCoder and Dream-Coder; and
what the dLLM library makes of llama, Qwen2 and Qwen3."""

_ITS_CODE = ("architectures", "auto_map", "_attn_implementation", "_experts_implementation")
"""Settings that name code."""


def import_masked_folder(folder: Path, dtype: torch.dtype | None = None) -> Program:
    """A checkpoint folder (config.json, safetensors) of a masked language model as a program.

    dtype: of the floating weights; None is the checkpoint's own. Errors: `InputError` for missing
    or wrong files, `UnsupportedError` for models that cannot be traced, or that hide later tokens.
    """
    check_files(folder)
    path = folder / "config.json"
    if not path.exists():
        raise InputError(f"{folder} holds no config.json; expected a checkpoint of transformers")
    check_settings(path)
    settings = read_object(path)
    kind = str(settings.get("model_type", "")).lower()
    made_from = MADE_FROM.get(kind)
    config = read_config(folder) if made_from is None else _config_of(folder, settings, made_from)
    found = contents(folder, config)
    check_layers(folder, config, len(found[0]))
    assets = {name: folder / name for name in ASSETS if (folder / name).exists()}
    program = import_tensors(
        *(folder, config, lambda twin: found, dtype),
        generation=None,
        assets=assets,
        family=MASKED if made_from is None else LANGUAGE,
    )
    if made_from is not None:
        program = replace(program, name=kind, info=replace(program.info, model_type=kind))
        return both_ways(program)
    if program.step.calls(G.attention.default):
        raise UnsupportedError(
            f"{folder}: {kind} hides later tokens: expected a masked language model"
        )
    return program


def _config_of(folder: Path, settings: dict[str, Any], kind: str) -> Any:
    """The settings as those of a model of transformers' own. Errors: `InputError`."""
    from transformers import CONFIG_MAPPING

    given = {name: value for name, value in settings.items() if name not in _ITS_CODE}
    with refusing(f"{folder}: transformers cannot read config.json as {kind}'s"):
        config = CONFIG_MAPPING[kind].from_dict({**given, "model_type": kind})
    config._attn_implementation = config._experts_implementation = None
    return config


def both_ways(program: Program) -> Program:
    """The program with attention to all tokens in the place of causal attention. Errors:
    `UnsupportedError` for attention that sees a part of a text."""
    fn = program.step.copy()
    lengths = fn.add_input("lengths", INPUTS["lengths"].type)
    for node in fn.calls(G.attention.default):
        given = arguments(node)
        options = {name: given[name] for name in ("layer", "scale")}
        more = ("sinks", "slopes", "distances", "window", "softcap", "chunk")
        if odd := [name for name in more if given[name] is not None]:
            raise UnsupportedError(
                f"{program.name}: attention with {odd[0]} to all tokens is not supported yet"
            )
        with fn.graph.inserting_before(node):
            args = [given[name] for name in "qkv"]
            seen = fn.call(
                G.source_attention.default, *args, lengths, site=site_of(node), **options
            )
        node.replace_all_uses_with(seen)
        fn.graph.erase_node(node)
    return program.with_function(fn)
