"""Tiny configurations of the architectures that the Hugging Face frontend is tested with.

Each is as small as it can be and still shows what is peculiar to its architecture: sliding windows
shorter than the test's eleven tokens, soft caps, sinks, partial rotary embedding, norms of queries
and keys, experts, tied embeddings, scaled logits, biases, ALiBi.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from graftwork.frontends import import_model
from graftwork.ir import Program, run


@dataclass(frozen=True)
class Arch:
    """A model type of transformers and the configuration to instantiate it with.

    blocks: residual blocks expected. parallel: attention and MLP run side by side, so that a block
    has one boundary. experts: layers that are mixtures of experts.
    """

    model_type: str
    config: dict[str, Any]
    blocks: int = 2
    parallel: bool = False
    experts: int = 0


_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_IDS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_SECOND = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_SCALED = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rope_type": "llama3",
}
"""As a file has it, so that a model in memory and its folder share a trace."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 32,
}
_BY_POSITION = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
}
_FALCON = {**_IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _base(**changes: Any) -> dict[str, Any]:
    return {**_BASE, **changes}


def text_config(**changes: Any) -> dict[str, Any]:
    """A small text model's part of a configuration."""
    return _base(**changes)


def _without_groups(**changes: Any) -> dict[str, Any]:
    """For models that have no grouped-query attention, and no such option."""
    return {k: v for k, v in _base(**changes).items() if k != "num_key_value_heads"}


def _opt(**changes: Any) -> dict[str, Any]:
    """OPT calls the width of its MLP by another name."""
    config = _without_groups(ffn_dim=48, **changes)
    return {k: v for k, v in config.items() if k != "intermediate_size"}


def _table() -> dict[str, Arch]:
    dense = {
        "apertus": _base(),
        "arcee": _base(),
        "biogpt": _without_groups(),
        "bitnet": _base(),
        "cwm": _base(head_dim=8, **_MIXED),
        "diffllama": _base(),
        "ernie4_5": _base(head_dim=8, use_bias=True),
        "exaone4": _base(**_MIXED),
        "gemma": _base(head_dim=16),
        "gemma2": _base(
            head_dim=16,
            sliding_window=5,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "gemma3_text": _base(
            head_dim=16, query_pre_attn_scalar=12, final_logit_softcapping=3.0, **_MIXED
        ),
        "glm": _base(head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
        "glm4": _base(head_dim=8, partial_rotary_factor=0.5, attention_bias=True),
        "gpt2": _GPT,
        "gpt_bigcode": {**_GPT, "multi_query": True},
        "gpt_neo": {
            **_IDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "intermediate_size": 48,
        },
        "gpt_neox_japanese": _without_groups(rotary_pct=0.5),
        "granite": _base(**_SCALED),
        "helium": _base(head_dim=8),
        "hunyuan_v1_dense": _base(head_dim=8),
        "jais2": _base(head_dim=8),
        "llama": _base(rope_parameters=_LLAMA3, attention_bias=True, mlp_bias=True),
        "ministral": _base(head_dim=8, **_MIXED),
        "ministral3": _base(head_dim=8, rope_parameters=_BY_POSITION),
        # Its experts run on every token and are weighed by 0, which is no mixture to a compiler.
        "llama4_text": _base(
            head_dim=8,
            attention_chunk_size=5,
            no_rope_layers=[1, 0],
            attn_temperature_tuning=True,
            floor_scale=4,
            attn_scale=0.5,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=48,
            **_LOCAL,
        ),
        "mistral": _base(sliding_window=5),
        "modernbert-decoder": _without_groups(local_attention=8, global_attn_every_n_layers=2),
        "mpt": {
            **_IDS,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "expansion_ratio": 2,
        },
        "nanochat": _base(head_dim=8),
        "nemotron": _base(head_dim=8, partial_rotary_factor=0.5, norm_eps=1e-5),
        "olmo": _base(clip_qkv=0.5),
        "olmo2": _base(),
        "olmo3": _base(**_MIXED),
        "openai-gpt": _GPT,
        "opt": _opt(word_embed_proj_dim=16),
        "persimmon": _without_groups(partial_rotary_factor=0.5, qk_layernorm=True),
        "phi3": _base(
            sliding_window=5, partial_rotary_factor=0.5, original_max_position_embeddings=64
        ),
        "qwen2": _base(**_SECOND),
        "qwen3": _base(head_dim=16, **_SECOND),
        "seed_oss": _base(head_dim=16, attention_bias=True, attention_out_bias=True),
        "smollm3": _base(no_rope_layers=[1, 0], use_sliding_window=True, **_MIXED),
        "starcoder2": _base(sliding_window=5, use_bias=True),
        "vaultgemma": _base(
            head_dim=16,
            sliding_window=5,
            query_pre_attn_scalar=12,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
        "xglm": {
            **_IDS,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
        "youtu": _base(**_MLA),
    }
    parallel = {
        "codegen": {**_GPT, "rotary_dim": 4},
        "cohere": _base(logit_scale=0.25, use_qk_norm=True),
        "cohere2": _base(logit_scale=0.25, **_MIXED),
        "gpt_neox": _without_groups(rotary_pct=0.5, use_parallel_residual=True),
        "gptj": {**_GPT, "rotary_dim": 4},
        "phi": _base(partial_rotary_factor=0.5, qk_layernorm=True),
        "stablelm": _base(
            use_qkv_bias=True,
            qk_layernorm=True,
            use_parallel_residual=True,
            partial_rotary_factor=0.5,
        ),
    }
    sparse = {
        "dbrx": {
            **_IDS,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "hidden_size": 32,
            },
        },
        "flex_olmo": _base(num_experts=4, num_experts_per_tok=2),
        "gpt_oss": _base(head_dim=16, sliding_window=5, **_LOCAL),
        "granitemoe": _base(**_LOCAL, **_SCALED),
        "granitemoeshared": _base(shared_intermediate_size=24, **_LOCAL),
        "hunyuan_v1_moe": _base(head_dim=8, num_experts=4, moe_topk=2, num_shared_expert=1),
        "minimax": _base(head_dim=16, layer_types=["full_attention"] * 2, **_LOCAL),
        "minimax_m2": _base(head_dim=16, **_LOCAL),
        "mixtral": _base(sliding_window=5, **_LOCAL),
        "olmoe": _base(num_experts=4, num_experts_per_tok=2, clip_qkv=0.5),
        "phimoe": _base(sliding_window=5, lm_head_bias=True, attention_bias=True, **_LOCAL),
        "qwen3_moe": _base(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
    }
    half_sparse = {
        "afmoe": _base(
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            num_dense_layers=1,
            num_shared_experts=1,
            **_MIXED,
        ),
        "deepseek_v2": _base(
            n_group=2,
            topk_group=1,
            topk_method="group_limited_greedy",
            routed_scaling_factor=2.0,
            **_MLA,
            **_ROUTED,
        ),
        "deepseek_v3": _base(n_group=2, topk_group=1, routed_scaling_factor=2.0, **_MLA, **_ROUTED),
        "dots1": _base(head_dim=8, n_group=1, topk_group=1, **_ROUTED, **_MIXED),
        "ernie4_5_moe": _base(
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=24,
            moe_layer_start_index=1,
            moe_num_shared_experts=1,
            use_bias=True,
        ),
        "glm4_moe": _base(
            head_dim=8,
            n_group=1,
            topk_group=1,
            partial_rotary_factor=0.5,
            use_qk_norm=True,
            **_ROUTED,
        ),
        "qwen2_moe": _base(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
            **_SECOND,
        ),
    }
    table = {name: Arch(name, config) for name, config in dense.items()}
    table |= {name: Arch(name, config, parallel=True) for name, config in parallel.items()}
    table |= {name: Arch(name, config, experts=2) for name, config in sparse.items()}
    table |= {name: Arch(name, config, experts=1) for name, config in half_sparse.items()}
    return table | _variants()


def _variants() -> dict[str, Arch]:
    """Further configurations of a model type that take another way through its code."""
    falcon = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
    return {
        "bloom": Arch("bloom", {**_IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
        "ctrl": Arch("ctrl", {**_GPT, "dff": 48}),
        "falcon": Arch("falcon", falcon, parallel=True),
        "falcon-alibi": Arch(
            "falcon",
            {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        ),
        "falcon-multi-query": Arch("falcon", _FALCON, parallel=True),
        "llama-tied-yarn": Arch("llama", _base(rope_parameters=_YARN, tie_word_embeddings=True)),
        "opt-post-norm": Arch("opt", _opt(do_layer_norm_before=False)),
    }


ARCHS = _table()
"""By name: a model type of transformers, or one with a suffix for a variant."""

REFUSED = {
    "doge": (Arch("doge", _base()), r"layers\.0\.self_attn .*computes with its attention mask"),
    "jetmoe": (
        Arch(
            "jetmoe",
            {
                **_IDS,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "kv_channels": 8,
                "intermediate_size": 48,
                "max_position_embeddings": 64,
                **_LOCAL,
            },
        ),
        r"layers\.0\.self_attention.*depends on the values of tensors",
    ),
}
"""Models that the frontend refuses, and what it says."""


def build(arch: Arch, seed: int = 0) -> Any:
    """The model with random weights, large enough that every part shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(arch.model_type, **arch.config)
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(float("norm" in name or "ln" in name) + 0.1 * noise)
    return model


@cache
def imported(name: str) -> tuple[Any, Program]:
    """An architecture's model and its program, traced once for all tests of a run.

    Change neither. No token ends a text, so that all have the length asked for.
    """
    model = build(ARCHS[name])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model, import_model(model)


TOLERANCE = 1e-4
"""Largest difference of float32 logits, as a share of their scale."""


def tokens_and_positions(batch: int = 2, tokens: int = 11, first: int = 0) -> Any:
    """Random token ids and consecutive positions, i64[B,T] each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 128, (batch, tokens), generator=generator)
    return ids, torch.arange(first, first + tokens).expand(batch, tokens)


def logits_of(program: Program, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The step's logits in the reference interpreter."""
    return run(program, "step", {"tokens": ids, "positions": positions})["logits"]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the scale of the expected values."""
    return float((got - expected).abs().max() / expected.abs().max())
