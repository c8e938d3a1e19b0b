"""Every causal language model type of the installed transformers, shrunk to a random tiny one.

A type whose configuration the other tables spell out is taken from there; of all others the default
configuration is shrunk attribute by attribute.
"""

from __future__ import annotations

from typing import Any

from archs import ARCHS, REFUSED, Arch
from recurrent_archs import RECURRENT

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("n_inner", "dff", "dim_ff", "feed_forward_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "moe_intermediate_size", "dense_ff"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim", "swa_head_dim", "d_kv"), 8),
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size"), 5),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 6),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("index_n_heads", "index_head_dim"), 8),
    "index_topk": 4,
    "attention_chunk_size": 6,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "conv_L_cache": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
"""What an attribute of this name becomes, if a configuration has it as a number."""


def model_types() -> list[str]:
    """All that transformers makes causal language models of, but for second names of one class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    first: dict[str, str] = {}
    for name in sorted(NAMES, key=lambda n: (not n.endswith("_text"), n)):
        first.setdefault(NAMES[name], name)
    return sorted(first.values())


def shrunk(model_type: str) -> Arch:
    """A tiny configuration of a type. Errors: whatever transformers raises where it has none."""
    from transformers import AutoConfig

    refused = {name: arch for name, (arch, _) in REFUSED.items()}
    spelled = {a.model_type: a for a in [*refused.values(), *RECURRENT.values(), *ARCHS.values()]}
    if model_type in spelled:
        return spelled[model_type]
    default = AutoConfig.for_model(model_type)
    return Arch(model_type, _small(default.get_text_config(decoder=True), default))


def _small(text: Any, whole: Any) -> dict[str, Any]:
    given = text.to_dict()
    known = {name: given.get(name, getattr(text, name, None)) for name in {*SMALL, *given}}
    kept = {n: v for n, v in SMALL.items() if isinstance(known.get(n), (int, float))}
    kept |= {name: None for name in ("quantization_config",) if name in given}
    layers = 2
    for name, value in given.items():
        if isinstance(value, list) and len(value) > layers and len(value) == _layers(given):
            kept[name] = _some(value, layers)
    if type(text) is type(whole):
        return kept
    name = next(n for n in ("text_config", "decoder", "llm_config") if getattr(whole, n, 0) is text)
    return {name: kept}


def _layers(given: dict[str, Any]) -> int:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    return next((given[name] for name in names if isinstance(given.get(name), int)), -1)


def _some(values: list[Any], count: int) -> list[Any]:
    """So many of a list with one entry a layer, of different kinds if there are."""
    kinds = sorted({str(v): v for v in values}.values(), key=lambda v: values.index(v))
    return [kinds[i % len(kinds)] for i in range(count)]
