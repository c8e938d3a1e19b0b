"""Options of models with recurrences and convolutions, as `options`."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata
from .mixtures import ALL_SPARSE, experts, shared_expert
from .terms import Entries, Fixed, Key, Present, both


@both(
    lambda config: {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0
            for kind in config.layer_types
        ]
    }
)
def _attending(meta: Metadata) -> dict[str, Any]:
    groups = meta.counts("attention.head_count_kv")
    return {
        "num_key_value_heads": max(groups),
        "layer_types": ["full_attention" if count > 0 else "conv" for count in groups],
    }


LFM2 = (
    _attending,
    Key("shortconv.l_cache", "conv_L_cache"),
    Fixed({"block_auto_adjust_ff_dim": False}),
)


@both()
def _expanded(meta: Metadata) -> dict[str, Any]:
    if meta.flag("ssm.dt_b_c_rms", False):
        raise meta.unlike("ssm.dt_b_c_rms", True, False)
    return {
        "expand": meta.number("ssm.inner_size", int) // meta.number("embedding_length", int),
    }


_STATES = (
    _expanded,
    Key("ssm.state_size"),
    Key("ssm.conv_kernel"),
    Present("use_bias", "blk.0.ssm_in.bias"),
    Present("use_conv_bias", "blk.0.ssm_conv1d.bias"),
)
MAMBA = *_STATES, Key("ssm.inner_size", "intermediate_size"), Key("ssm.time_step_rank")


@both(
    lambda config: {
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.time_step_rank": config.num_heads,
    }
)
def _state_heads(meta: Metadata) -> dict[str, Any]:
    heads = meta.number("ssm.time_step_rank", int)
    inner = meta.number("ssm.inner_size", int)
    return {"num_heads": heads, "head_dim": inner // max(heads, 1)}


MAMBA2 = *_STATES, _state_heads, Key("ssm.group_count", "n_groups")


def _delta_entries(config: Any) -> Entries:
    kinds = [*config.layer_types, "full_attention"]
    return {
        "full_attention_interval": kinds.index("full_attention") + 1,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


@both(_delta_entries)
def _delta(meta: Metadata) -> dict[str, Any]:
    """Layers with a gated delta rule, of heads for which groups have keys; every so many-th layer
    attends instead, or those that a list says."""
    groups, heads = meta.number("ssm.group_count", int), meta.number("ssm.time_step_rank", int)
    inner, layers = meta.number("ssm.inner_size", int), meta.layers
    every = meta.number("full_attention_interval", int, 4)
    if not groups or not heads or heads % groups or inner % heads or not every:
        raise meta.no_model(
            f"{heads} heads over {groups} of {inner} channels, but in every {every}th layer, are "
            f"no linear attention"
        )
    given = meta.get("attention.recurrent_layers")
    recurrent = [(layer + 1) % every != 0 for layer in range(layers)]
    if isinstance(given, tuple) and len(given) == meta.number("block_count", int):
        recurrent = [bool(one) for one in given[:layers]]
    elif given is not None:
        raise meta.unlike("attention.recurrent_layers", given, f"one for each of {layers} layers")
    return {
        "linear_value_head_dim": inner // heads,
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent],
    }


_DELTA = (
    _delta,
    Key("ssm.conv_kernel", "linear_conv_kernel_dim"),
    Key("ssm.group_count", "linear_num_key_heads"),
    Key("ssm.state_size", "linear_key_head_dim"),
    Key("ssm.time_step_rank", "linear_num_value_heads"),
)
_SHARING = (*experts(), shared_expert)
QWEN3_NEXT = (*_DELTA, *_SHARING, ALL_SPARSE, Fixed({"norm_topk_prob": True}))


def _in_turns(pairs: int) -> list[int]:
    """How many of so many pairs of channels each of three axes has, if they have them in turns."""
    return [len(range(axis, pairs, 3)) for axis in range(3)]


def _sections_entries(config: Any) -> Entries:
    rope = config.rope_parameters
    pairs = int(config.head_dim * rope["partial_rotary_factor"]) // 2
    return {"rope.dimension_sections": [*(rope.get("mrope_section") or _in_turns(pairs)), 0]}


@both(_sections_entries)
def _sections(meta: Metadata) -> dict[str, Any]:
    """Which pairs of channels turn with which of a picture's positions, in turns. A text's are all
    the same; llama.cpp leaves pairs behind their sections unturned."""
    key = "rope.dimension_sections"
    given = meta.get(key)
    axes = tuple(n for n in given if type(n) is int) if isinstance(given, tuple) else ()
    pairs = meta.number("rope.dimension_count", int, meta.number("attention.key_length", int)) // 2
    inside = min(pairs, sum(axes))
    covered = all(map(int.__ge__, axes, _in_turns(inside)))
    if len(axes) not in (3, 4) or inside <= 0 or not covered:
        raise meta.unlike(key, given, f"three numbers, and sections of all {pairs} pairs")
    return {}


QWEN35 = (*_DELTA, _sections)
QWEN35_MOE = (*QWEN35, *_SHARING)
