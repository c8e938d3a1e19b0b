"""Options of mixtures of experts, as `options`."""

from __future__ import annotations

from typing import Any

from .metadata import Metadata
from .options import CLAMP, GRANITE, alternating, rotary_entries
from .terms import Entries, Fixed, Key, Present, Term, both


def experts(count: str = "num_experts", width: str = "moe_intermediate_size") -> tuple[Term, ...]:
    """Options of mixtures: transformers' names of how many experts there are, and of the width
    between their two products, which is another entry's where it is not given."""

    @both(lambda config: Key("expert_feed_forward_length", width).write(config))
    def term(meta: Metadata) -> dict[str, Any]:
        found = meta.number("expert_feed_forward_length", int, 0)
        return {width: found} if found else {}

    used = Key("expert_used_count", "num_experts_per_tok")
    return Key("expert_count", count), used, term


MIXTRAL = experts("num_local_experts")


@both(lambda config: {"expert_shared_feed_forward_length": config.shared_expert_intermediate_size})
def shared_expert(meta: Metadata) -> dict[str, Any]:
    shared = meta.size("blk.0.ffn_up_shexp.weight", 0)
    meta.number("expert_shared_feed_forward_length", int, shared)
    return {"shared_expert_intermediate_size": shared}


ALL_SPARSE = Fixed({"decoder_sparse_step": 1, "mlp_only_layers": []})
QWEN2_MOE = (
    *experts(),
    shared_expert,
    Key("expert_weights_norm", "norm_topk_prob", bool, False),
    Present("qkv_bias", "blk.0.attn_q.bias"),
    ALL_SPARSE,
)
QWEN3_MOE = (*experts(), Key("expert_weights_norm", "norm_topk_prob", bool, True), ALL_SPARSE)
OLMOE = (
    *experts(width="intermediate_size"),
    Key("expert_weights_norm", "norm_topk_prob", bool, False),
    CLAMP,
)


@both()
def _not_truncated(meta: Metadata) -> dict[str, Any]:
    rotary = meta.rotary()
    if rotary["rope_type"] == "yarn":
        rotary["truncate"] = False
    return {"rope_parameters": rotary}


GPT_OSS = (
    *experts("num_local_experts", "intermediate_size"),
    alternating(2, 128),
    _not_truncated,
    Fixed({"attention_bias": True}),
)


@both(lambda config: {"expert_feed_forward_length": config.intermediate_size})
def _ignored_widths(meta: Metadata) -> dict[str, Any]:
    """What the tensors say: the width of all experts is the MLP's."""
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        meta.number(key, int, 0)
    return {}


GRANITE_MOE = (*GRANITE, *experts("num_local_experts")[:2], _ignored_widths)


def _latent_entries(config: Any) -> Entries:
    turned, rank = config.qk_rope_head_dim, config.kv_lora_rank
    yarn = config.rope_parameters.get("mscale_all_dim")
    return {
        **Key("attention.q_lora_rank", "q_lora_rank").write(config),
        "attention.kv_lora_rank": rank,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": turned,
        **rotary_entries(config.rope_parameters, config.max_position_embeddings),
        **({"rope.scaling.yarn_log_multiplier": yarn / 10} if yarn else {}),
        "expert_group_count": config.n_group or 1,
        "expert_group_used_count": config.topk_group or 1,
    }


@both(_latent_entries)
def _latent(meta: Metadata) -> dict[str, Any]:
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
        "n_group": groups,
        "topk_group": meta.number("expert_group_used_count", int, 1),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


DEEPSEEK2 = (
    _latent,
    *experts("n_routed_experts"),
    Key("expert_shared_count", "n_shared_experts", default=0),
    Key("leading_dense_block_count", "first_k_dense_replace", default=0),
    Key("expert_weights_scale", "routed_scaling_factor", float, 0.0, zero=1.0),
    Key("expert_weights_norm", "norm_topk_prob", bool, False),
)


@both(lambda config: {"expert_gating_func": 2})
def _sigmoids(meta: Metadata) -> dict[str, Any]:
    if (kind := meta.number("expert_gating_func", int, 2)) != 2:
        raise meta.unlike("expert_gating_func", kind, 2)
    return {}


DEEPSEEK3 = (*DEEPSEEK2, _sigmoids)
