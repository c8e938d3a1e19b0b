"""Tiny configurations of models with recurrences and convolutions, one a family."""

from __future__ import annotations

from typing import Any

from archs import Arch, text_config

_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_BOTH = ["linear_attention", "full_attention"]
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
}
_IDS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_PURE = {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "conv_kernel": 4}


def _table() -> dict[str, dict[str, Any]]:
    return {
        "bamba": text_config(attn_layer_indices=[1], **_MAMBA2),
        "falcon_h1": text_config(head_dim=8, mamba_d_ssm=64, **_MAMBA2),
        "falcon_mamba": {**_PURE, "state_size": 4, "intermediate_size": 48},
        "granitemoehybrid": text_config(
            layer_types=["mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=24,
            **_MAMBA2,
        ),
        "jamba": text_config(
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=4,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        ),
        "kimi_linear": text_config(
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            linear_num_heads=4,
            linear_head_dim=8,
            linear_conv_kernel_dim=4,
            layer_types=_BOTH,
            first_k_dense_replace=2,
            n_group=1,
            topk_group=1,
        ),
        "lfm2": text_config(layer_types=["conv", "full_attention"]),
        "mamba": {**_PURE, "state_size": 4, "intermediate_size": 48},
        "mamba2": {
            **_PURE,
            "num_heads": 8,
            "head_dim": 8,
            "expand": 2,
            "n_groups": 2,
            "state_size": 6,
            "chunk_size": 4,
        },
        "nemotron_h": text_config(
            num_hidden_layers=3,
            layers_block_type=["mamba", "attention", "mlp"],
            head_dim=8,
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=2,
            ssm_state_size=6,
            conv_kernel=4,
            chunk_size=4,
        ),
        "olmo_hybrid": text_config(layer_types=_BOTH, **_LINEAR),
        "qwen3_5_text": text_config(head_dim=16, layer_types=_BOTH, **_LINEAR),
        "qwen3_5_moe_text": text_config(head_dim=16, layer_types=_BOTH, **_LINEAR, **_EXPERTS),
        "qwen3_next": text_config(
            head_dim=16, layer_types=_BOTH, decoder_sparse_step=1, **_LINEAR, **_EXPERTS
        ),
        "recurrent_gemma": text_config(
            lru_width=32,
            attention_window_size=5,
            conv1d_width=4,
            block_types=["recurrent", "attention"],
            head_dim=8,
        ),
        "zamba2": text_config(
            num_hidden_layers=3,
            layers_block_type=["mamba", "hybrid", "mamba"],
            n_mamba_heads=8,
            mamba_headdim=8,
            mamba_ngroups=2,
            mamba_d_state=6,
            mamba_d_conv=4,
            mamba_expand=2,
            chunk_size=4,
            num_mem_blocks=1,
            use_shared_attention_adapter=False,
        ),
    }


RECURRENT = {name: Arch(name, config) for name, config in _table().items()}
"""By model type."""
