"""Options of transformers' configurations that GGUF files give beside those that all have.

A function each, of the metadata; `architectures` says whose they are. Where a key is missing, the
value is the one that llama.cpp's loader takes.
"""

from __future__ import annotations

from typing import Any

from .metadata import Metadata


def llama(meta: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": meta.has("blk.0.attn_q.bias"),
        "mlp_bias": meta.has("blk.0.ffn_up.bias"),
    }


def biases(meta: Metadata) -> dict[str, Any]:
    return {"attention_bias": meta.has("blk.0.attn_q.bias")}


def alternating(meta: Metadata, every: int, window: int) -> dict[str, Any]:
    """Of so many layers one sees all tokens, the last of them."""
    layers = meta.number("block_count", int)
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


def gemma2(meta: Metadata) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": scaled_by(meta, 46),
        **alternating(meta, 2, 4096),
    }


def gemma3(meta: Metadata) -> dict[str, Any]:
    local = meta.number("rope.freq_base_swa", float, 10000.0)
    return {
        "final_logit_softcapping": meta.number("final_logit_softcapping", float, 0.0) or None,
        "query_pre_attn_scalar": scaled_by(meta, 62),
        "rope_parameters": {
            "full_attention": meta.rotary(),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        **alternating(meta, 6, 1024),
    }


def exaone4(meta: Metadata) -> dict[str, Any]:
    """Its smaller models have no window, and rotary embeddings in all layers."""
    layers = meta.number("block_count", int)
    if not meta.number("attention.sliding_window", int, 4096 if layers == 64 else 0):
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    return alternating(meta, 4, 4096)


def scaled_by(meta: Metadata, layers: int) -> float:
    """Of what Gemma's scores are divided by the root: a head's channels, but in its largest model,
    which llama.cpp knows by its layers, the hidden channels of a head."""
    heads, hidden = meta.count("attention.head_count"), meta.number("embedding_length", int)
    given = meta.number("attention.scale", float, 0.0)
    if given:
        return given**-2
    wide = meta.number("block_count", int) == layers
    return hidden / heads if wide else meta.number("attention.key_length", int, hidden // heads)


def experts(meta: Metadata, **names: str) -> dict[str, Any]:
    """Options of mixtures. names: of those that are not called as most models call them."""
    found = {
        names.get("experts", "num_experts"): meta.number("expert_count", int),
        "num_experts_per_tok": meta.number("expert_used_count", int),
    }
    if width := meta.number("expert_feed_forward_length", int, 0):
        found[names.get("width", "moe_intermediate_size")] = width
    return found


def mixtral(meta: Metadata) -> dict[str, Any]:
    return experts(meta, experts="num_local_experts")


def qwen2_moe(meta: Metadata) -> dict[str, Any]:
    shared = meta.size("blk.0.ffn_up_shexp.weight", 0)
    meta.number("expert_shared_feed_forward_length", int, shared)
    return {
        **experts(meta),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "qkv_bias": meta.has("blk.0.attn_q.bias"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen3_moe(meta: Metadata) -> dict[str, Any]:
    return {
        **experts(meta),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def olmoe(meta: Metadata) -> dict[str, Any]:
    meta.number("expert_feed_forward_length", int, 0)
    return {
        **experts(meta, width="intermediate_size"),
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "clip_qkv": meta.number("attention.clamp_kqv", float, 0.0) or None,
    }


def phi3(meta: Metadata) -> dict[str, Any]:
    window = meta.number("attention.sliding_window", int, 0)
    original = meta.number("rope.scaling.original_context_length", int, 0)
    context = meta.number("context_length", int)
    options: dict[str, Any] = {"sliding_window": window or None}
    if meta.has("rope_factors_short.weight"):
        rotary = {
            **meta.rotary(scaled=False),
            "rope_type": "longrope",
            "original_max_position_embeddings": original or context,
            "short_factor": meta.floats("rope_factors_short.weight"),
            "long_factor": meta.floats("rope_factors_long.weight"),
        }
        if factor := meta.number("rope.scaling.attn_factor", float, 0.0):
            rotary["attention_factor"] = factor
        options["rope_parameters"] = rotary
        options["original_max_position_embeddings"] = original or context
    return options


def gpt_oss(meta: Metadata) -> dict[str, Any]:
    rotary = meta.rotary()
    if rotary["rope_type"] == "yarn":
        rotary["truncate"] = False
    return {
        **experts(meta, experts="num_local_experts", width="intermediate_size"),
        **alternating(meta, 2, 128),
        "rope_parameters": rotary,
        "attention_bias": True,
    }


def falcon(meta: Metadata) -> dict[str, Any]:
    heads = meta.count("attention.head_count")
    groups = meta.count("attention.head_count_kv", heads)
    two = meta.has("blk.0.attn_norm_2.weight")
    new = two or 1 < groups < heads
    return {
        "num_kv_heads": groups,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": groups == 1 and not new,
        "parallel_attn": True,
        "alibi": False,
        "bias": meta.has("blk.0.attn_qkv.bias"),
    }


def mpt(meta: Metadata) -> dict[str, Any]:
    bias = meta.number("attention.max_alibi_bias", float, 0.0)
    if not bias:
        raise meta.unlike("attention.max_alibi_bias", bias, "more than 0, as transformers' MPT has")
    hidden = meta.number("embedding_length", int)
    return {
        "d_model": hidden,
        "n_heads": meta.count("attention.head_count"),
        "n_layers": meta.number("block_count", int),
        "max_seq_len": meta.number("context_length", int),
        "expansion_ratio": meta.count("feed_forward_length") // hidden,
        "no_bias": True,
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": int(bias),
            "clip_qkv": meta.number("attention.clamp_kqv", float, 0.0) or None,
        },
    }


def granite(meta: Metadata) -> dict[str, Any]:
    return {
        **llama(meta),
        "attention_multiplier": meta.number("attention.scale", float, 0.0) or meta.plain_scale(),
        "embedding_multiplier": meta.number("embedding_scale", float, 0.0) or 1.0,
        "residual_multiplier": meta.number("residual_scale", float, 0.0) or 1.0,
        "logits_scaling": meta.number("logit_scale", float, 0.0) or 1.0,
    }


def granite_moe(meta: Metadata) -> dict[str, Any]:
    meta.number("expert_shared_feed_forward_length", int, 0)
    return {**granite(meta), **experts(meta, experts="num_local_experts", width="ignored")}


def cohere(meta: Metadata) -> dict[str, Any]:
    return {
        **biases(meta),
        "logit_scale": meta.number("logit_scale", float, 0.0) or 1.0,
        "use_qk_norm": meta.has("blk.0.attn_q_norm.weight"),
    }


def lfm2(meta: Metadata) -> dict[str, Any]:
    groups = meta.counts("attention.head_count_kv")
    attends = [count > 0 for count in groups]
    return {
        "num_key_value_heads": max(groups),
        "layer_types": ["full_attention" if one else "conv" for one in attends],
        "conv_L_cache": meta.number("shortconv.l_cache", int),
        "block_auto_adjust_ff_dim": False,
    }


def mamba(meta: Metadata) -> dict[str, Any]:
    if meta.flag("ssm.dt_b_c_rms", False):
        raise meta.unlike("ssm.dt_b_c_rms", True, False)
    return {
        "intermediate_size": meta.number("ssm.inner_size", int),
        "expand": meta.number("ssm.inner_size", int) // meta.number("embedding_length", int),
        "state_size": meta.number("ssm.state_size", int),
        "conv_kernel": meta.number("ssm.conv_kernel", int),
        "time_step_rank": meta.number("ssm.time_step_rank", int),
        "use_bias": meta.has("blk.0.ssm_in.bias"),
        "use_conv_bias": meta.has("blk.0.ssm_conv1d.bias"),
    }


def mamba2(meta: Metadata) -> dict[str, Any]:
    options = mamba(meta)
    heads = options.pop("time_step_rank")
    inner = options.pop("intermediate_size")
    return {
        **options,
        "num_heads": heads,
        "head_dim": inner // max(heads, 1),
        "n_groups": meta.number("ssm.group_count", int),
    }


def t5(meta: Metadata) -> dict[str, Any]:
    gated = meta.has("enc.blk.0.ffn_gate.weight")
    if not meta.has("output.weight"):
        raise meta.unlike(
            "output.weight",
            "no such tensor",
            "one: whether logits are scaled is not said where it is the embedding",
        )
    layers = meta.number("block_count", int)
    return {
        "d_kv": meta.number("attention.key_length", int),
        "num_layers": layers,
        "num_decoder_layers": meta.number("decoder_block_count", int, layers),
        "relative_attention_num_buckets": meta.number("attention.relative_buckets_count", int),
        "decoder_start_token_id": meta.number("decoder_start_token_id", int),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }


def deepseek2(meta: Metadata) -> dict[str, Any]:
    """Attention over latent rows. Newer files hold one key head, which is the latent row, and the
    widths of a head of the model under names of their own."""
    latent, turned = (
        meta.number("attention.kv_lora_rank", int),
        meta.number("rope.dimension_count", int),
    )
    wide = meta.number("attention.key_length_mla", int, 0)
    for key, of_rows in (("key_length", latent + turned), ("value_length", latent)):
        if wide and (given := meta.number(f"attention.{key}", int, of_rows)) != of_rows:
            raise meta.unlike(f"attention.{key}", given, of_rows)
    wide = wide or meta.number("attention.key_length", int)
    heads = meta.count("attention.head_count")
    value = meta.number("attention.value_length_mla", int, 0)
    meta.count("attention.head_count_kv", heads)
    rotary = meta.rotary()
    if rotary["rope_type"] == "yarn":
        scale = 10 * meta.number("rope.scaling.yarn_log_multiplier", float, 0.0)
        rotary |= {"mscale": scale, "mscale_all_dim": scale}
    groups = meta.number("expert_group_count", int, 1)
    return {
        "intermediate_size": meta.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": meta.number("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": latent,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": wide - turned,
        "v_head_dim": value or meta.number("attention.value_length", int),
        "rope_parameters": rotary,
        **experts(meta, experts="n_routed_experts"),
        "n_shared_experts": meta.number("expert_shared_count", int, 0),
        "first_k_dense_replace": meta.number("leading_dense_block_count", int, 0),
        "routed_scaling_factor": meta.number("expert_weights_scale", float, 0.0) or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": meta.number("expert_group_used_count", int, 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def deepseek3(meta: Metadata) -> dict[str, Any]:
    if (kind := meta.number("expert_gating_func", int, 2)) != 2:
        raise meta.unlike("expert_gating_func", kind, 2)
    return deepseek2(meta)
