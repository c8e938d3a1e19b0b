"""What a GGUF file's metadata says of its model, as a configuration of transformers.

Keys of an architecture (``llama.*``) say how its model computes, and llama.cpp knows many that the
models here have no place for. So every key is either read, or changes nothing at all (`SILENT`), or
changes nothing at the value that it has (`_NEUTRAL`), or is refused by name. Meanings are those of
llama.cpp's loader: a rope factor without a type is linear, one of zero is none, and counts may be
arrays with an entry for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from ...ir import UnsupportedError
from ...ir.support.names import shown
from .architectures import ARCHITECTURES, Architecture
from .metadata import Metadata
from .reader import Value
from .terms import read_all

SILENT = {
    "attention.layer_norm_epsilon",  # norms of one kind have one epsilon: the other is not used
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window_pattern",  # which layers have the window
    "classifier.output_labels",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # this and the betas: of YaRN alone
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",  # the table of tokens says it
}

_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.group_norm_epsilon": (0,),
    "attention.group_norm_groups": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu", "swiglu"),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "ssm.group_count": (0,),
    "use_parallel_residual": (False,),
}


_SCALED = {"gemma2", "gemma3_text", "granite", "granitemoe"}
"""Models that are given the scale of their scores."""


def architecture_of(meta: Metadata) -> Architecture:
    """Errors: `UnsupportedError` for another than those that are read."""
    if meta.name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{meta.file.path}: general.architecture: expected one of "
            f"{', '.join(n for n in ARCHITECTURES if ' ' not in n)}, got {shown(meta.name)}"
        )
    if not meta.number("expert_count", int, 0):
        return ARCHITECTURES[meta.name]
    sigmoids = any(name.endswith(".exp_probs_b.bias") for name in meta.file.tensors)
    special = f"{meta.name} with sigmoids" if sigmoids else f"{meta.name} of experts"
    found = ARCHITECTURES.get(special, ARCHITECTURES[meta.name])
    if not found.experts:
        raise UnsupportedError(
            f"{meta.file.path}: {meta.name} models with experts are not supported"
        )
    return found


def config_of(meta: Metadata) -> dict[str, Any]:
    """Options of transformers' configuration. Errors: `InputError` for numbers that do not fit
    each other or the tensors, `UnsupportedError` for what has no place in such a model."""
    known = architecture_of(meta)
    layers, hidden = meta.layers, meta.number("embedding_length", int)
    context = meta.number("context_length", int)
    meta.expect("embedding_length_out", hidden, "as the embedding has")
    meta.check_layers(layers, hidden)
    norm = "layer_norm_epsilon" if known.centred else "layer_norm_rms_epsilon"
    found: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": meta.file.tensors["token_embd.weight"].dims[0],
        "max_position_embeddings": context,
        known.eps: meta.number(f"attention.{norm}", float),
        "tie_word_embeddings": "output.weight" not in meta.file.tensors,
        "dtype": "float32",
    }
    if not 0 < context < 2**31:
        raise meta.no_model(f"{meta.name}.context_length is {context}")
    if known.alike:
        found |= _attention(meta, known, hidden, context)
    found |= read_all(known.options, meta)
    _refuse_others(meta)
    return found


def _attention(meta: Metadata, known: Architecture, hidden: int, context: int) -> dict[str, Any]:
    """Options of attention and of the MLP behind it."""
    heads = meta.count("attention.head_count")
    key = "attention.head_count_kv"  # 0 in layers that have no attention
    groups = meta.count(key, heads) if known.attends else max(meta.counts(key, heads))
    if not heads or not hidden or not groups or heads % groups:
        raise meta.no_model(f"{heads} heads over {groups} of {hidden} channels are no model")
    dim = meta.number("attention.key_length", int, hidden // heads)
    meta.expect("attention.value_length", dim, "as keys have")
    inner = meta.count("feed_forward_length", 0)
    meta.check_rows(hidden, (heads * dim, groups * dim, inner))
    found: dict[str, Any] = {
        known.inner: inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }
    if known.any_dim:
        found["head_dim"] = dim
    else:
        meta.expect("attention.key_length", hidden // heads, "as many as all heads share")
    if known.rotary:
        found["rope_parameters"] = _rope(meta, known, dim)
    if not known.window and 0 < (window := meta.count("attention.sliding_window", 0)) < context:
        raise UnsupportedError(
            f"{meta.file.path}: {meta.name}.attention.sliding_window={window}: expected none, "
            f"or the whole context of {context} tokens"
        )
    _check_scale(meta, known, dim)
    return found


def _rope(meta: Metadata, known: Architecture, dim: int) -> dict[str, Any]:
    if not dim or dim % 2:
        raise meta.no_model(f"heads of {dim} channels have no rotary embedding")
    if not known.partial:
        meta.expect("rope.dimension_count", dim, "as keys have")
        return meta.rotary()
    turned = meta.number("rope.dimension_count", int, dim)
    if not 0 < turned <= dim or turned % 2:
        raise meta.no_model(f"{turned} of {dim} channels have no rotary embedding")
    return {**meta.rotary(), "partial_rotary_factor": turned / dim}


def _check_scale(meta: Metadata, known: Architecture, dim: int) -> None:
    """Errors: `UnsupportedError` for a scale of scores that the model cannot be given."""
    scale, plain = meta.number("attention.scale", float, 0.0), dim**-0.5
    if known.model_type in _SCALED or not scale or isclose(scale, plain, rel_tol=1e-5):
        return
    raise meta.unlike("attention.scale", scale, plain)


def _refuse_others(meta: Metadata) -> None:
    """Errors: `UnsupportedError` for a key that may change what the model computes."""
    for whole, value in meta.file.metadata.items():
        key = whole.removeprefix(f"{meta.name}.")
        neutral = _NEUTRAL.get(key, ())
        same = any(value == v and isinstance(value, bool) is isinstance(v, bool) for v in neutral)
        if key == whole or key in meta.read or key in SILENT or same:
            continue
        fine = " or ".join(map(repr, neutral))
        raise UnsupportedError(
            f"{meta.file.path}: {whole} is {shown(value)}, and {meta.name} models are read "
            f"{f'with {fine}' if fine else 'without that'}: it may change what the model "
            f"computes. If it does not, take the key away (gguf-new-metadata "
            f"--remove-metadata {whole})"
        )
