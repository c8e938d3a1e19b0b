"""Export of trained EAGLE-3 drafts for vLLM, in the layout of its ``speculators`` library.

A folder of ``config.json`` and ``model.safetensors``: ``fc``, ``layers.0.*``, ``norm``, ``lm_head``
and ``embed_tokens``; for a draft vocabulary ``d2t`` (offsets, i64[D]) and ``t2d`` (bool[V]).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..ir import Function, InputError, Program
from ..ir.plan import CachedDraft
from ..ir.rewrite.subgraph import evaluate, extract
from ..ir.support.files import read_json
from ..passes.drafting.draft_vocabulary import draft_ids
from .heads import find_draft, write_heads

A, G = torch.ops.aten, torch.ops.graftwork
PREFIX, LAYER = "eagle3.", "eagle3.midlayer."
PARTS = ("self_attn.q_proj", "mlp.gate_proj")


def export_speculators(program: Program, folder: Path, target: str = "") -> Path:
    """Write a trained EAGLE-3 draft for vLLM. target: name or path of the target model in the
    configuration; default: the program's name. Errors: `InputError` if the program has no such
    draft, or one that the layout cannot represent: quantized weights, other than three target
    layers, another rotary embedding than llama's."""
    draft = find_draft(program, CachedDraft, "EAGLE-3 drafts are cached(function='eagle3', ...)")
    if draft.function != "eagle3" or draft.output is None:
        raise InputError(f"the program drafts with {draft}; expected an EAGLE-3 draft")
    if not draft.trained:
        raise InputError("the draft is untrained; train it first (graftwork train)")
    fn = program.function(draft.function)
    tensors = _tensors(program, fn)
    layer = _layer_config(program, fn, tensors)
    size = tensors["lm_head.weight"].shape[0]
    record = next(r for r in program.provenance if r.name == "draft_eagle3")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": draft.levels},
            ],
            "verifier": {
                "name_or_path": target or program.name,
                "architectures": _architectures(program),
            },
        },
        "draft_vocab_size": size,
        "eagle_aux_hidden_state_layer_ids": [int(n) for n in draft.output.split(".")[1:-1]],
        "norm_before_residual": bool(dict(record.options)["norm_before_residual"]),
        "norm_before_fc": False,
        "target_hidden_size": layer["hidden_size"],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    return write_heads(folder, config, tensors)


def _architectures(program: Program) -> list[str]:
    """`architectures` of the target's config.json, if the program has it."""
    path = program.assets.get("config.json")
    config = read_json(path) if path is not None else {}
    return list(config.get("architectures") or [])


def _tensors(program: Program, fn: Function) -> dict[str, torch.Tensor]:
    """The draft's weights under the names of the layout."""
    ours = {n: w for n, w in program.weights.items() if n.startswith(PREFIX)}
    for name in (f"{LAYER}{part}.weight" for part in PARTS):
        if name not in ours:
            raise InputError(
                f"expected the weight {name} as it was trained; the draft's weights were quantized "
                f"or merged: export from a recipe that leaves them alone"
            )
    named = {n.removeprefix(PREFIX).replace("midlayer.", "layers.0."): w for n, w in ours.items()}
    tensors = {n: w.load() for n, w in named.items() if n.endswith(".weight")}
    tables = [n for n in fn.calls(A.embedding.default) if n.args[1] is fn.input("tokens")]
    table = program.weights[str(tables[0].args[0].target)]  # type: ignore[union-attr]
    tensors["embed_tokens.weight"] = table.load()
    if "d2t" in named:
        d2t = named["d2t"].load()
        t2d = torch.zeros(program.info.vocab_size, dtype=torch.bool)
        t2d[draft_ids(d2t)] = True
        tensors |= {"d2t": d2t, "t2d": t2d}
    return tensors


def _layer_config(
    program: Program, fn: Function, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Configuration of the decoder layer, as a llama of one layer."""
    caches = [s.type.dims for n, s in program.states.items() if n.startswith("eagle3.kv.")]
    if not caches:
        raise InputError("the draft has no cache: export a program that ran insert_kv_cache")
    groups, dim = int(str(caches[0][1])), int(str(caches[0][3]))
    inner, hidden = tensors["layers.0.mlp.gate_proj.weight"].shape
    norms = [node.kwargs["eps"] for node in fn.calls(G.rms_norm.default)]
    vocabulary = tensors["embed_tokens.weight"].shape[0]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": tensors["layers.0.self_attn.q_proj.weight"].shape[0] // dim,
        "num_key_value_heads": groups,
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": norms[0],
        "rope_theta": rope_base(program, fn, dim),
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocabulary,
        "max_position_embeddings": program.info.context,
        "tie_word_embeddings": False,
    }


def rope_base(program: Program, fn: Function, dim: int) -> float:
    """The base of a function's rotary embedding of heads of `dim` channels.

    Errors: `InputError` if its angles are not position * base^(-2i / dim).
    """
    node = fn.calls(G.rotary.default)[0]
    cos, sin = node.all_input_nodes[1:3]
    piece = extract(fn, {"cos": cos, "sin": sin})
    weights = {name: program.weights[name].load() for name in piece.weights}
    found = evaluate(piece, weights, {"positions": torch.tensor([[1]])})
    rates = torch.atan2(found["sin"].double(), found["cos"].double())[0, 0]
    places = torch.arange(len(rates), dtype=torch.float64)
    # The second channel's rate is base^(-2 / dim).
    base = float(rates[1]) ** (-dim / 2) if len(rates) > 1 else 1e4
    plain = 2 * len(rates) == dim and torch.allclose(rates, base ** (-2 * places / dim), rtol=2e-2)
    if not plain or node.kwargs.get("interleaved"):
        raise InputError(
            f"the draft's rotary embedding turns {2 * len(rates)} of {dim} channels by "
            f"{[round(float(rate), 4) for rate in rates[:4]]}... a position; vLLM's layout has "
            f"base^(-2i / {dim}) for all of them, in halves"
        )
    return float(f"{base:.5g}")
