"""Options of transformers' configurations that GGUF files give beside those that all have.

Terms, which read and write (see `terms`); `architectures` says whose they are. Where an entry is
missing, the value is the one that llama.cpp's loader takes. `mixtures` and `recurrences` have those
of such models.
"""

from __future__ import annotations

from typing import Any

from .metadata import Metadata
from .terms import Both, Entries, Fixed, Key, Present, both

ATTENTION_BIAS = Present("attention_bias", "blk.0.attn_q.bias")
LLAMA = ATTENTION_BIAS, Present("mlp_bias", "blk.0.ffn_up.bias")
PARALLEL = Key("use_parallel_residual", kind=bool, default=True)
CLAMP = Key("attention.clamp_kqv", "clip_qkv", float, 0.0, zero=None)
_LOGIT_SCALE = Key("logit_scale", kind=float, default=0.0, zero=1.0)


def rotary_entries(rope: Any, context: int) -> Entries:
    """What `Metadata.rotary` reads, of rotary embeddings as transformers has them; those whose
    frequencies are divided one by one (llama 3.1) are in a tensor of the file, not here."""
    entries: Entries = {"rope.freq_base": float(rope["rope_theta"])}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        entries |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        entries |= {
            "rope.scaling.original_context_length": int(
                rope.get("original_max_position_embeddings") or context
            ),
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
        }
    return entries


def alternating(every: int, window: int) -> Both:
    """Of so many layers one sees all tokens, the last of them. Files are written without a pattern:
    llama.cpp knows it by the architecture."""

    @both(lambda config: Key("attention.sliding_window", "sliding_window").write(config))
    def term(meta: Metadata) -> dict[str, Any]:
        layers = meta.layers
        given = meta.get("attention.sliding_window_pattern")
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
        if isinstance(given, tuple) and len(given) == layers:
            sliding = [bool(one) for one in given]
        elif given is not None and given != every:
            raise meta.unlike("attention.sliding_window_pattern", given, every)
        return {
            "sliding_window": meta.number("attention.sliding_window", int, window),
            "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        }

    return term


def scaled_by(layers: int) -> Both:
    """Of what Gemma's scores are divided by the root: a head's channels, but in its largest model,
    which llama.cpp knows by its layers, the hidden channels of a head. It reads no other scale, so
    none is written."""

    @both()
    def term(meta: Metadata) -> dict[str, Any]:
        heads, hidden = meta.count("attention.head_count"), meta.number("embedding_length", int)
        scale = meta.number("attention.scale", float, 0.0)
        wide = meta.layers == layers
        plain = (
            hidden / heads if wide else meta.number("attention.key_length", int, hidden // heads)
        )
        return {"query_pre_attn_scalar": scale**-2 if scale else plain}

    return term


GEMMA2 = (
    Key("attn_logit_softcapping", kind=float, default=50.0),
    Key("final_logit_softcapping", kind=float, default=30.0),
    scaled_by(46),
    alternating(2, 4096),
)


@both(
    lambda config: {
        **rotary_entries(config.rope_parameters["full_attention"], config.max_position_embeddings),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }
)
def _two_bases(meta: Metadata) -> dict[str, Any]:
    local = meta.number("rope.freq_base_swa", float, 10000.0)
    return {
        "rope_parameters": {
            "full_attention": meta.rotary(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        }
    }


GEMMA3 = (
    Key("final_logit_softcapping", kind=float, default=0.0, zero=None),
    scaled_by(62),
    _two_bases,
    alternating(6, 1024),
)


@both(lambda config: Key("attention.sliding_window", "sliding_window").write(config))
def _exaone4(meta: Metadata) -> dict[str, Any]:
    """Its smaller models have no window, and rotary embeddings in all layers."""
    layers = meta.layers
    if not meta.number("attention.sliding_window", int, 4096 if layers == 64 else 0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return alternating(4, 4096).read(meta)


EXAONE4 = (_exaone4,)


def _longrope_entries(config: Any) -> Entries:
    rope = config.rope_parameters
    if rope.get("rope_type") != "longrope":
        return {}
    factor = rope.get("attention_factor")
    return {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        "rope_factors_short.weight": list(map(float, rope["short_factor"])),
        "rope_factors_long.weight": list(map(float, rope["long_factor"])),
        **({"rope.scaling.attn_factor": float(factor)} if factor else {}),
    }


@both(_longrope_entries)
def _longrope(meta: Metadata) -> dict[str, Any]:
    original = meta.number("rope.scaling.original_context_length", int, 0)
    if not meta.has("rope_factors_short.weight"):
        return {}
    original = original or meta.number("context_length", int)
    rotary = {
        **meta.rotary(scaled=False),
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "short_factor": meta.floats("rope_factors_short.weight"),
        "long_factor": meta.floats("rope_factors_long.weight"),
    }
    if factor := meta.number("rope.scaling.attn_factor", float, 0.0):
        rotary["attention_factor"] = factor
    return {"rope_parameters": rotary, "original_max_position_embeddings": original}


PHI3 = Key("attention.sliding_window", default=0, zero=None), _longrope


@both(
    lambda config: {
        "attention.head_count_kv": config.num_kv_heads
        if config.new_decoder_architecture or not config.multi_query
        else 1
    }
)
def _falcon(meta: Metadata) -> dict[str, Any]:
    heads = meta.count("attention.head_count")
    groups = meta.count("attention.head_count_kv", heads)
    two = meta.has("blk.0.attn_norm_2.weight")
    new = two or 1 < groups < heads
    return {
        "num_kv_heads": groups if new or groups > 1 else heads,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
        "multi_query": groups == 1 or new,
    }


FALCON = (
    _falcon,
    Fixed({"parallel_attn": True, "alibi": False}),
    Present("bias", "blk.0.attn_qkv.bias"),
)


def _mpt_entries(config: Any) -> Entries:
    attention = config.attn_config
    clamp = {"attention.clamp_kqv": float(attention.clip_qkv)} if attention.clip_qkv else {}
    bias = float(attention.alibi_bias_max) if attention.alibi else 0.0
    return {
        "context_length": config.max_seq_len,
        "feed_forward_length": config.expansion_ratio * config.d_model,
        "attention.max_alibi_bias": bias,
        **clamp,
    }


@both(_mpt_entries)
def _mpt(meta: Metadata) -> dict[str, Any]:
    bias = meta.number("attention.max_alibi_bias", float, 0.0)
    if not bias:
        raise meta.unlike("attention.max_alibi_bias", bias, "more than 0, as transformers' MPT has")
    hidden = meta.number("embedding_length", int)
    return {
        "d_model": hidden,
        "n_heads": meta.count("attention.head_count"),
        "n_layers": meta.layers,
        "max_seq_len": meta.number("context_length", int),
        "expansion_ratio": meta.count("feed_forward_length") // hidden,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(bias),
            **CLAMP.read(meta),
        },
    }


MPT = (_mpt,)


def _positions_entries(config: Any) -> Entries:
    rope = config.rope_parameters
    return {
        **rotary_entries(rope, config.max_position_embeddings),
        "rope.scaling.original_context_length": int(rope["original_max_position_embeddings"]),
        "rope.scaling.yarn_log_multiplier": float(rope.get("mscale_all_dim") or 0.0),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }


@both(_positions_entries)
def _scaled_by_position(meta: Metadata) -> dict[str, Any]:
    """Queries grow with the logarithm of how often their position holds the original context."""
    rotary, context = meta.rotary(), meta.number("context_length", int)
    original = meta.number("rope.scaling.original_context_length", int, 0) or context
    if rotary["rope_type"] == "yarn" and (
        scale := meta.number("rope.scaling.yarn_log_multiplier", float, 0.0)
    ):
        rotary |= {"mscale": 1.0, "mscale_all_dim": scale}
    beta = meta.number("attention.temperature_scale", float, 0.0)
    rotary |= {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
    return {"rope_parameters": rotary}


MISTRAL3 = (_scaled_by_position,)


@both(lambda config: {"attention.scale": float(config.attention_multiplier)})
def _given_scale(meta: Metadata) -> dict[str, Any]:
    return {
        "attention_multiplier": meta.number("attention.scale", float, 0.0) or meta.plain_scale()
    }


GRANITE = (
    *LLAMA,
    _given_scale,
    Key("embedding_scale", "embedding_multiplier", float, 0.0, zero=1.0),
    Key("residual_scale", "residual_multiplier", float, 0.0, zero=1.0),
    Key("logit_scale", "logits_scaling", float, 0.0, zero=1.0),
)


COHERE = ATTENTION_BIAS, _LOGIT_SCALE, Present("use_qk_norm", "blk.0.attn_q_norm.weight")
COHERE2 = ATTENTION_BIAS, _LOGIT_SCALE, alternating(4, 4096)


@both(
    lambda config: {
        "decoder_block_count": config.num_decoder_layers,
        "attention.value_length": config.d_kv,
    }
)
def _t5(meta: Metadata) -> dict[str, Any]:
    gated = meta.has("enc.blk.0.ffn_gate.weight")
    if not meta.has("output.weight"):
        raise meta.unlike(
            "output.weight",
            "no such tensor",
            "one: whether logits are scaled is not said where it is the embedding",
        )
    layers = meta.layers
    return {
        "num_layers": layers,
        "num_decoder_layers": meta.number("decoder_block_count", int, layers),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }


T5 = (
    _t5,
    Key("attention.key_length", "d_kv"),
    Key("attention.relative_buckets_count", "relative_attention_num_buckets"),
    Key("decoder_start_token_id"),
)
