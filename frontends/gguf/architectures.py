"""The architectures of GGUF files, a row each.

A row says which model of transformers computes the same, which options of its configuration the
metadata gives beside those that all have (`Metadata.config`), and which tensors the format keeps in
another layout. Names of tensors come from the `gguf` package's table. Facts are those of
llama.cpp's loader and of its converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .metadata import Metadata

Options = Callable[["Metadata"], dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """How the format keeps a tensor, if not as transformers does. kind: see `tensors.LAYOUTS`.
    sizes: what that takes, of a configuration."""

    kind: str
    sizes: Callable[[Any], tuple[int, ...]] = lambda config: ()


@dataclass(frozen=True)
class Architecture:
    """An architecture that is read.

    model_type: transformers' name. eps: its option for the norms' epsilon. centred: whether norms
    subtract the mean, so that their epsilon has another key. rotary: whether there is a rotary
    embedding. partial: whether it may be of the first channels of a head alone. divided: whether a
    tensor may hold divisors of its frequencies. window: whether layers may have a sliding window.
    inner: transformers' option for the width between an MLP's two products. options: others.
    layouts: by regular expressions over transformers' names.
    """

    model_type: str
    eps: str = "rms_norm_eps"
    centred: bool = False
    rotary: bool = True
    partial: bool = False
    divided: bool = False
    window: bool = False
    inner: str = "intermediate_size"
    experts: bool = False
    any_dim: bool = True
    attends: bool = True
    alike: bool = True
    options: Options = lambda said: {}
    layouts: Mapping[str, Layout] = field(default_factory=dict)


_PAIRS = {
    r"\bq_proj\.": Layout("pairs", lambda config: (config.num_attention_heads,)),
    r"\bk_proj\.": Layout("pairs", lambda config: (config.num_key_value_heads,)),
}
"""Rows of queries and keys are in the order of pairs (2i, 2i+1), and of (i, i + half) here."""

_NORMS = {r"norm\.weight$": Layout("less one")}
"""The format keeps 1 + w, and the model adds the 1 itself."""


def _fused(config: Any) -> tuple[int, ...]:
    """All queries, all keys, all values; here those of one group of heads after the other."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        groups = 1
    return groups, heads // groups, config.hidden_size // heads


_FUSED = {r"query_key_value\.": Layout("grouped", _fused)}


def _llama(said: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": said.has("blk.0.attn_q.bias"),
        "mlp_bias": said.has("blk.0.ffn_up.bias"),
    }


def _biases(said: Metadata) -> dict[str, Any]:
    return {"attention_bias": said.has("blk.0.attn_q.bias")}


def _alternating(said: Metadata, every: int, window: int) -> dict[str, Any]:
    """Of so many layers one sees all tokens, the last of them."""
    layers = said.number("block_count", int)
    given = said.get("attention.sliding_window_pattern")
    sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    if isinstance(given, tuple) and len(given) == layers:
        sliding = [bool(one) for one in given]
    elif given is not None and given != every:
        raise said.unlike("attention.sliding_window_pattern", given, every)
    return {
        "sliding_window": said.number("attention.sliding_window", int, window),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
    }


def _gemma2(said: Metadata) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": said.number("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": said.number("final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": _scaled_by(said, 46),
        **_alternating(said, 2, 4096),
    }


def _gemma3(said: Metadata) -> dict[str, Any]:
    local = said.number("rope.freq_base_swa", float, 10000.0)
    return {
        "final_logit_softcapping": said.number("final_logit_softcapping", float, 0.0) or None,
        "query_pre_attn_scalar": _scaled_by(said, 62),
        "rope_parameters": {
            "full_attention": said.rotary(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        **_alternating(said, 6, 1024),
    }


def _exaone4(said: Metadata) -> dict[str, Any]:
    """Its smaller models have no window, and rotary embeddings in all layers."""
    layers = said.number("block_count", int)
    if not said.number("attention.sliding_window", int, 4096 if layers == 64 else 0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return _alternating(said, 4, 4096)


def _scaled_by(said: Metadata, layers: int) -> float:
    """Of what Gemma's scores are divided by the root: a head's channels, but in its largest model,
    which llama.cpp knows by its layers, the hidden channels of a head."""
    heads, hidden = said.count("attention.head_count"), said.number("embedding_length", int)
    given = said.number("attention.scale", float, 0.0)
    if given:
        return given**-2
    wide = said.number("block_count", int) == layers
    return hidden / heads if wide else said.number("attention.key_length", int, hidden // heads)


def _experts(said: Metadata, **names: str) -> dict[str, Any]:
    """Options of mixtures. names: of those that are not called as most models call them."""
    found = {
        names.get("experts", "num_experts"): said.number("expert_count", int),
        "num_experts_per_tok": said.number("expert_used_count", int),
    }
    if width := said.number("expert_feed_forward_length", int, 0):
        found[names.get("width", "moe_intermediate_size")] = width
    return found


def _mixtral(said: Metadata) -> dict[str, Any]:
    return _experts(said, experts="num_local_experts")


def _qwen2_moe(said: Metadata) -> dict[str, Any]:
    shared = said.size("blk.0.ffn_up_shexp.weight", 0)
    said.number("expert_shared_feed_forward_length", int, shared)
    return {
        **_experts(said),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "qkv_bias": said.has("blk.0.attn_q.bias"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3_moe(said: Metadata) -> dict[str, Any]:
    return {
        **_experts(said),
        "norm_topk_prob": said.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _olmoe(said: Metadata) -> dict[str, Any]:
    said.number("expert_feed_forward_length", int, 0)
    return {
        **_experts(said, width="intermediate_size"),
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "clip_qkv": said.number("attention.clamp_kqv", float, 0.0) or None,
    }


def _phi3(said: Metadata) -> dict[str, Any]:
    window = said.number("attention.sliding_window", int, 0)
    original = said.number("rope.scaling.original_context_length", int, 0)
    context = said.number("context_length", int)
    options: dict[str, Any] = {"sliding_window": window or None}
    if said.has("rope_factors_short.weight"):
        rotary = {
            **said.rotary(scaled=False),
            "rope_type": "longrope",
            "original_max_position_embeddings": original or context,
            "short_factor": said.floats("rope_factors_short.weight"),
            "long_factor": said.floats("rope_factors_long.weight"),
        }
        if factor := said.number("rope.scaling.attn_factor", float, 0.0):
            rotary["attention_factor"] = factor
        options["rope_parameters"] = rotary
        options["original_max_position_embeddings"] = original or context
    return options


def _gpt_oss(said: Metadata) -> dict[str, Any]:
    rotary = said.rotary()
    if rotary["rope_type"] == "yarn":
        rotary["truncate"] = False
    return {
        **_experts(said, experts="num_local_experts", width="intermediate_size"),
        **_alternating(said, 2, 128),
        "rope_parameters": rotary,
        "attention_bias": True,
    }


def _falcon(said: Metadata) -> dict[str, Any]:
    heads = said.count("attention.head_count")
    groups = said.count("attention.head_count_kv", heads)
    two = said.has("blk.0.attn_norm_2.weight")
    new = two or 1 < groups < heads
    return {
        "num_kv_heads": groups,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": groups == 1 and not new,
        "parallel_attn": True,
        "alibi": False,
        "bias": said.has("blk.0.attn_qkv.bias"),
    }


def _mpt(said: Metadata) -> dict[str, Any]:
    bias = said.number("attention.max_alibi_bias", float, 0.0)
    if not bias:
        raise said.unlike("attention.max_alibi_bias", bias, "more than 0, as transformers' MPT has")
    hidden = said.number("embedding_length", int)
    return {
        "d_model": hidden,
        "n_heads": said.count("attention.head_count"),
        "n_layers": said.number("block_count", int),
        "max_seq_len": said.number("context_length", int),
        "expansion_ratio": said.count("feed_forward_length") // hidden,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(bias),
            "clip_qkv": said.number("attention.clamp_kqv", float, 0.0) or None,
        },
    }


def _granite(said: Metadata) -> dict[str, Any]:
    return {
        **_llama(said),
        "attention_multiplier": said.number("attention.scale", float, 0.0) or said.plain_scale(),
        "embedding_multiplier": said.number("embedding_scale", float, 0.0) or 1.0,
        "residual_multiplier": said.number("residual_scale", float, 0.0) or 1.0,
        "logits_scaling": said.number("logit_scale", float, 0.0) or 1.0,
    }


def _granite_moe(said: Metadata) -> dict[str, Any]:
    said.number("expert_shared_feed_forward_length", int, 0)
    return {**_granite(said), **_experts(said, experts="num_local_experts", width="ignored")}


def _cohere(said: Metadata) -> dict[str, Any]:
    return {
        **_biases(said),
        "logit_scale": said.number("logit_scale", float, 0.0) or 1.0,
        "use_qk_norm": said.has("blk.0.attn_q_norm.weight"),
    }


def _lfm2(said: Metadata) -> dict[str, Any]:
    groups = said.counts("attention.head_count_kv")
    attends = [count > 0 for count in groups]
    return {
        "num_key_value_heads": max(groups),
        "layer_types": ["full_attention" if one else "conv" for one in attends],
        "conv_L_cache": said.number("shortconv.l_cache", int),
        "block_auto_adjust_ff_dim": False,
    }


def _mamba(said: Metadata) -> dict[str, Any]:
    if said.flag("ssm.dt_b_c_rms", False):
        raise said.unlike("ssm.dt_b_c_rms", True, False)
    return {
        "intermediate_size": said.number("ssm.inner_size", int),
        "expand": said.number("ssm.inner_size", int) // said.number("embedding_length", int),
        "state_size": said.number("ssm.state_size", int),
        "conv_kernel": said.number("ssm.conv_kernel", int),
        "time_step_rank": said.number("ssm.time_step_rank", int),
        "use_bias": said.has("blk.0.ssm_in.bias"),
        "use_conv_bias": said.has("blk.0.ssm_conv1d.bias"),
    }


def _mamba2(said: Metadata) -> dict[str, Any]:
    options = _mamba(said)
    heads = options.pop("time_step_rank")
    inner = options.pop("intermediate_size")
    return {
        **options,
        "num_heads": heads,
        "head_dim": inner // max(heads, 1),
        "n_groups": said.number("ssm.group_count", int),
    }


def _t5(said: Metadata) -> dict[str, Any]:
    gated = said.has("enc.blk.0.ffn_gate.weight")
    if not said.has("output.weight"):
        raise said.unlike(
            "output.weight",
            "no such tensor",
            "one: whether logits are scaled is not said where it is the embedding",
        )
    layers = said.number("block_count", int)
    return {
        "d_kv": said.number("attention.key_length", int),
        "num_layers": layers,
        "num_decoder_layers": said.number("decoder_block_count", int, layers),
        "relative_attention_num_buckets": said.number("attention.relative_buckets_count", int),
        "decoder_start_token_id": said.number("decoder_start_token_id", int),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }


def _deepseek2(said: Metadata) -> dict[str, Any]:
    """Attention over latent rows. Newer files hold one key head, which is the latent row, and the
    widths of a head of the model under names of their own."""
    latent, turned = (
        said.number("attention.kv_lora_rank", int),
        said.number("rope.dimension_count", int),
    )
    wide = said.number("attention.key_length_mla", int, 0)
    for key, of_rows in (("key_length", latent + turned), ("value_length", latent)):
        if wide and (given := said.number(f"attention.{key}", int, of_rows)) != of_rows:
            raise said.unlike(f"attention.{key}", given, of_rows)
    wide = wide or said.number("attention.key_length", int)
    heads = said.count("attention.head_count")
    value = said.number("attention.value_length_mla", int, 0)
    said.count("attention.head_count_kv", heads)
    rotary = said.rotary()
    if rotary["rope_type"] == "yarn":
        scale = 10 * said.number("rope.scaling.yarn_log_multiplier", float, 0.0)
        rotary |= {"mscale": scale, "mscale_all_dim": scale}
    groups = said.number("expert_group_count", int, 1)
    return {
        "intermediate_size": said.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": said.number("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": wide - turned,
        "v_head_dim": value or said.number("attention.value_length", int),
        "rope_parameters": rotary,
        **_experts(said, experts="n_routed_experts"),
        "n_shared_experts": said.number("expert_shared_count", int, 0),
        "first_k_dense_replace": said.number("leading_dense_block_count", int, 0),
        "routed_scaling_factor": said.number("expert_weights_scale", float, 0.0) or 1.0,
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": said.number("expert_group_used_count", int, 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _deepseek3(said: Metadata) -> dict[str, Any]:
    if (kind := said.number("expert_gating_func", int, 2)) != 2:
        raise said.unlike("expert_gating_func", kind, 2)
    return _deepseek2(said)


_STATES = {
    r"\.A_log$": Layout("log of minus"),
    r"\.conv1d\.weight$": Layout("reshaped"),
    r"\.(D|norm\.weight)$": Layout("reshaped"),
}
_LATENT = {r"\.kv_b_proj\.weight$": Layout("latent")}
_OF_LAYER_NORM: dict[str, Any] = {"centred": True, "eps": "layer_norm_eps"}
_OF_GPT: dict[str, Any] = {"centred": True, "eps": "layer_norm_epsilon", "rotary": False}

ARCHITECTURES = {
    "arcee": Architecture("arcee", options=_llama, layouts=_PAIRS),
    "bloom": Architecture("bloom", layouts=_FUSED, **_OF_GPT),
    "cohere2": Architecture(
        "cohere2",
        window=True,
        options=lambda said: {**_cohere(said), **_alternating(said, 4, 4096)},
        **_OF_LAYER_NORM,
    ),
    "command-r": Architecture("cohere", options=_cohere, **_OF_LAYER_NORM),
    "deepseek2": Architecture(
        "deepseek_v2", alike=False, experts=True, options=_deepseek2, layouts=_LATENT
    ),
    "deepseek2 with sigmoids": Architecture(
        "deepseek_v3", alike=False, experts=True, options=_deepseek3, layouts=_LATENT
    ),
    "ernie4_5": Architecture(
        "ernie4_5", options=lambda s: {"use_bias": s.has("blk.0.attn_q.bias")}
    ),
    "exaone4": Architecture("exaone4", divided=True, window=True, options=_exaone4),
    "falcon": Architecture(
        "falcon",
        inner="ffn_hidden_size",
        any_dim=False,
        options=_falcon,
        layouts=_FUSED,
        centred=True,
        eps="layer_norm_epsilon",
    ),
    "gemma": Architecture("gemma", layouts=_NORMS),
    "gemma2": Architecture("gemma2", window=True, options=_gemma2, layouts=_NORMS),
    "gemma3": Architecture("gemma3_text", window=True, options=_gemma3, layouts=_NORMS),
    "glm4": Architecture("glm4", partial=True, options=_biases),
    "gpt-oss": Architecture(
        "gpt_oss",
        window=True,
        experts=True,
        options=_gpt_oss,
        layouts={
            r"experts\.gate_up_proj": Layout("interleaved"),
            r"experts\.down_proj$": Layout("transposed"),
        },
    ),
    "gpt2": Architecture(
        "gpt2",
        inner="n_inner",
        layouts={r"(c_attn|c_proj|c_fc)\.weight$": Layout("transposed")},
        **_OF_GPT,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        partial=True,
        options=lambda said: {"use_parallel_residual": said.flag("use_parallel_residual", True)},
        layouts=_FUSED,
        **_OF_LAYER_NORM,
    ),
    "granite": Architecture("granite", options=_granite, layouts=_PAIRS),
    "granitemoe": Architecture("granitemoe", experts=True, options=_granite_moe, layouts=_PAIRS),
    "lfm2": Architecture(
        "lfm2",
        eps="norm_eps",
        attends=False,
        options=_lfm2,
        layouts={r"conv\.conv\.weight$": Layout("reshaped")},
    ),
    "llama": Architecture("llama", divided=True, options=_llama, layouts=_PAIRS),
    "llama of experts": Architecture("mixtral", experts=True, options=_mixtral, layouts=_PAIRS),
    "mamba": Architecture(
        "mamba", alike=False, eps="layer_norm_epsilon", options=_mamba, layouts=_STATES
    ),
    "mamba2": Architecture(
        "mamba2", alike=False, eps="layer_norm_epsilon", options=_mamba2, layouts=_STATES
    ),
    "mpt": Architecture("mpt", options=_mpt, **_OF_GPT),
    "nemotron": Architecture(
        "nemotron", partial=True, centred=True, eps="norm_eps", options=_llama, layouts=_NORMS
    ),
    "olmo2": Architecture("olmo2", options=_biases),
    "olmoe": Architecture("olmoe", experts=True, options=_olmoe),
    "phi2": Architecture("phi", partial=True, **_OF_LAYER_NORM),
    "phi3": Architecture("phi3", partial=True, window=True, options=_phi3),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", experts=True, options=_qwen2_moe),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", experts=True, options=_qwen3_moe),
    "seed_oss": Architecture(
        "seed_oss",
        options=lambda said: {
            **_biases(said),
            "attention_out_bias": said.has("blk.0.attn_output.bias"),
        },
    ),
    "smollm3": Architecture("smollm3", options=_llama, layouts=_PAIRS),
    "stablelm": Architecture(
        "stablelm",
        partial=True,
        options=lambda said: {
            "use_parallel_residual": said.flag("use_parallel_residual", True),
            "use_qkv_bias": said.has("blk.0.attn_q.bias"),
        },
        **_OF_LAYER_NORM,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        centred=True,
        eps="norm_epsilon",
        options=lambda said: {"use_bias": said.has("blk.0.attn_q.bias"), "sliding_window": None},
    ),
    "t5": Architecture("t5", eps="layer_norm_epsilon", rotary=False, inner="d_ff", options=_t5),
}
"""By the name that a file has in general.architecture."""
