"""Files of every architecture that is read, made of transformers' tiny models as llama.cpp's
converter makes them of real ones: its names, keys and layouts, said here a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from archs import ARCHS, build
from gguf_files import tokenizer
from gguf_layouts import (
    apart,
    delta_groups,
    delta_heads,
    experts,
    falcon,
    gpt2,
    gpt_oss,
    latent_heads,
    mamba,
    mixtral,
    pairs,
    plus_one,
    squeezed,
)
from recurrent_archs import RECURRENT
from source_models import made

Keys = Callable[[Any], dict[str, Any]]
Move = Callable[[str, np.ndarray, Any], Iterator[tuple[str, np.ndarray]]]


@dataclass(frozen=True)
class Written:
    """model: the tiny model's name in `ARCHS`. keys: what its metadata says beside what all say.
    move: tensors that the format lays in another way, by the format's name of them."""

    model: str
    keys: Keys = lambda config: {}
    move: Move = lambda name, data, config: iter(((name, data),))
    change: dict[str, Any] = field(default_factory=dict)


def _granite(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _mixture(config: Any) -> dict[str, Any]:
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    keys = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if width := getattr(config, "moe_intermediate_size", None):
        keys["expert_feed_forward_length"] = width
    if width := getattr(config, "shared_expert_intermediate_size", None):
        keys["expert_shared_feed_forward_length"] = width
    return keys


def _partial(config: Any) -> dict[str, Any]:
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"rope.dimension_count": int(dim * config.rope_parameters["partial_rotary_factor"])}


def _window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _soft_caps(config: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        **_window(config),
    }


def _yarn(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow", 1.0),
    }


def _by_position(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        **_yarn(config),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def _ssm(config: Any) -> dict[str, Any]:
    heads = getattr(config, "num_heads", None)
    keys = {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
        "ssm.inner_size": int(config.expand * config.hidden_size)
        if heads
        else config.intermediate_size,
        "ssm.time_step_rank": heads or config.time_step_rank,
    }
    return {**keys, "ssm.group_count": config.n_groups} if heads else keys


def _delta(config: Any) -> dict[str, Any]:
    return {
        **_partial(config),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 2,
    }


def _sections(config: Any) -> dict[str, Any]:
    return {**_delta(config), "rope.dimension_sections": [1, 1, 0, 0]}


def _mpt(config: Any) -> dict[str, Any]:
    return {"attention.max_alibi_bias": float(config.attn_config.alibi_bias_max)}


def _t5(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.d_kv,
        "attention.value_length": config.d_kv,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "decoder_start_token_id": config.decoder_start_token_id,
        "decoder_block_count": config.num_decoder_layers,
    }


def _latent(config: Any) -> dict[str, Any]:
    sigmoids = config.model_type == "deepseek_v3"
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": 2 if sigmoids else 1,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
    }


_GROUPS = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 32}
_SIX = ["sliding_attention"] * 5 + ["full_attention"]

FILES: dict[str, Written] = {
    "arcee": Written("arcee", move=pairs),
    "bloom": Written("bloom", move=apart),
    "cohere2": Written(
        "cohere2",
        lambda c: {"logit_scale": c.logit_scale, **_window(c)},
        change={"num_hidden_layers": 4, "layer_types": None},
    ),
    "command-r": Written(
        "cohere", lambda c: {"logit_scale": c.logit_scale}, change={"use_qk_norm": False}
    ),
    "command-r (plus)": Written("cohere", lambda c: {"logit_scale": c.logit_scale}),
    "deepseek2": Written(
        "deepseek_v2", _latent, latent_heads, {"topk_method": "greedy", "n_group": 1}
    ),
    "deepseek2 (v3)": Written("deepseek_v3", _latent, latent_heads, {"n_group": 1}),
    "ernie4_5": Written("ernie4_5", change={"use_bias": False}),
    "exaone": Written(
        "llama", change={"rope_parameters": None, "attention_bias": False, "mlp_bias": False}
    ),
    "exaone4": Written("exaone4", change={"sliding_window": None, "layer_types": None}),
    "exaone4 (32b)": Written(
        "exaone4", _window, change={"num_hidden_layers": 4, "layer_types": None}
    ),
    "falcon": Written("falcon", move=falcon),
    "falcon (7b)": Written("falcon-multi-query", lambda c: {"attention.head_count_kv": 1}, falcon),
    "gemma": Written("gemma", move=plus_one),
    "gemma2": Written("gemma2", _soft_caps, plus_one, {"query_pre_attn_scalar": 16}),
    "gemma3": Written(
        "gemma3_text",
        lambda c: {"final_logit_softcapping": c.final_logit_softcapping, **_window(c)},
        plus_one,
        {"num_hidden_layers": 6, "layer_types": _SIX, "query_pre_attn_scalar": 16},
    ),
    "glm4": Written("glm4", _partial),
    "gpt-oss": Written(
        "gpt_oss",
        lambda c: {
            **_mixture(c),
            **_window(c),
            **_yarn(c),
            "expert_feed_forward_length": c.intermediate_size,
        },
        gpt_oss,
    ),
    "gpt2": Written("gpt2", move=gpt2),
    "gptneox": Written(
        "gpt_neox",
        lambda c: {**_partial(c), "use_parallel_residual": c.use_parallel_residual},
        apart,
    ),
    "granite": Written("granite", _granite, pairs),
    "granitemoe": Written("granitemoe", lambda c: {**_granite(c), **_mixture(c)}, mixtral),
    "lfm2": Written(
        "lfm2",
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "attention.head_count_kv": [
                c.num_key_value_heads if t == "full_attention" else 0 for t in c.layer_types
            ],
        },
        squeezed,
        {"block_auto_adjust_ff_dim": False},
    ),
    "llama": Written("llama", move=pairs, change={"rope_parameters": None}),
    "llama (yarn)": Written("llama-tied-yarn", _yarn, pairs),
    "llama (experts)": Written("mixtral", _mixture, mixtral, {"sliding_window": None}),
    "mamba": Written("mamba", _ssm, mamba, {"intermediate_size": 128}),
    "mamba2": Written("mamba2", _ssm, mamba, {"head_dim": 16}),
    "mistral3": Written("ministral3", _by_position, pairs),
    "mpt": Written("mpt", _mpt),
    "nemotron": Written("nemotron", _partial, plus_one, {"head_dim": 16}),
    "olmo2": Written("olmo2"),
    "olmoe": Written("olmoe", _mixture, experts, {"clip_qkv": None, "num_key_value_heads": 4}),
    "phi2": Written("phi", _partial, change={"qk_layernorm": False}),
    "phi3": Written("phi3", _partial, change={"sliding_window": None}),
    "phi3 (window)": Written("phi3", lambda c: {**_window(c), **_partial(c)}),
    "qwen2": Written("qwen2", change={"use_sliding_window": False, "layer_types": None}),
    "qwen2moe": Written(
        "qwen2_moe",
        _mixture,
        experts,
        {"mlp_only_layers": [], "use_sliding_window": False, "layer_types": None},
    ),
    "qwen3": Written("qwen3", change={"use_sliding_window": False, "layer_types": None}),
    "qwen3moe": Written(
        "qwen3_moe",
        _mixture,
        experts,
        {"mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False},
    ),
    "qwen35": Written("qwen3_5_text", _sections, delta_heads, _GROUPS),
    "qwen35 (16 channels)": Written(
        "qwen3_5_text", _sections, delta_heads, {"linear_value_head_dim": 16}
    ),
    "qwen35moe": Written(
        "qwen3_5_moe_text", lambda c: {**_sections(c), **_mixture(c)}, delta_heads, _GROUPS
    ),
    "qwen3next": Written(
        "qwen3_next",
        lambda c: {**_delta(c), **_mixture(c)},
        delta_groups,
        {**_GROUPS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "seed_oss": Written("seed_oss", change={"attention_out_bias": False}),
    "smollm3": Written(
        "smollm3",
        move=pairs,
        change={
            **{"num_hidden_layers": 4, "no_rope_layers": None},
            **{"use_sliding_window": False, "layer_types": None, "sliding_window": None},
        },
    ),
    "stablelm": Written(
        "stablelm",
        lambda c: {**_partial(c), "use_parallel_residual": c.use_parallel_residual},
        change={"qk_layernorm": False},
    ),
    "t5": Written("t5", _t5, change={"tie_word_embeddings": False}),
    "starcoder2": Written("starcoder2", change={"sliding_window": None}),
}


def tiny(which: str) -> Any:
    """The model of a row, of sizes that blocks of 32 fit."""
    row = FILES[which]
    if row.model == "t5":
        model = made("t5", **row.change)
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.3)
        return model
    known = ARCHS.get(row.model) or RECURRENT[row.model]
    sizes = {
        name: size
        for name, size in {"hidden_size": 64, "intermediate_size": 96, "n_embd": 64}.items()
        if name in known.config
    }
    config = {**known.config, **sizes, **row.change}
    model = build(replace(known, config={k: v for k, v in config.items() if v is not None}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.5, 0.5, len(buffer)))
    return model


def write(
    path: Path, which: str, kind: str = "F32", *, floats: bool = False, parts: int = 0
) -> Any:
    """A row's file, and its model. kind: the type of weights of two axes or more. floats: written
    as float32 nevertheless, of the values that blocks of `kind` stand for. parts: tensors in each
    of several files; 0: one file."""
    model, row = tiny(which), FILES[which]
    config = model.config
    name = which.split(" ")[0]
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    writer = gguf.GGUFWriter(path, name, split_max_tensors=parts)
    for key, value in {**_common(config), **row.keys(config)}.items():
        whole = type(value) is int  # the package takes whole numbers for signed ones
        kind_of = gguf.GGUFValueType.UINT32 if whole else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{name}.{key}", value, kind_of)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tokenizer(writer, config.vocab_size)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for parameter, data in _held(model).items():
        theirs = _their_name(table, parameter)
        for final, part in row.move(theirs, data.float().numpy(), config):
            _add(writer, final, np.ascontiguousarray(part), kind, floats)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _held(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: tied weights once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name].detach() for name in first.values()}


def _common(config: Any) -> dict[str, Any]:
    def first(*names: str) -> Any:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    hidden, heads = config.hidden_size, first("num_attention_heads")
    rms = first("rms_norm_eps")
    keys = {
        "context_length": first("max_position_embeddings", "max_seq_len") or 64,
        "embedding_length": hidden,
        "block_count": config.num_hidden_layers,
        "attention.layer_norm_rms_epsilon": rms or first("norm_eps", "layer_norm_epsilon"),
        "attention.layer_norm_epsilon": None
        if rms
        else first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    }
    if not config.model_type.startswith("mamba"):
        dim = first("head_dim") or hidden // heads
        keys |= {
            "feed_forward_length": first("intermediate_size", "n_inner", "ffn_hidden_size", "d_ff")
            or 4 * hidden,
            "attention.head_count": heads,
            "attention.head_count_kv": first("num_key_value_heads", "num_kv_heads") or heads,
            "attention.key_length": dim,
            "attention.value_length": dim,
        }
        rope = first("rope_parameters")
        if rope:
            keys["rope.freq_base"] = rope.get("full_attention", rope)["rope_theta"]
            keys["rope.dimension_count"] = dim
    return {key: value for key, value in keys.items() if value is not None}


def _their_name(table: Any, parameter: str) -> str:
    layer = parameter.split(".")[2] if parameter.startswith("model.layers.") else ""
    for end, theirs in {
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.gate_up_proj_bias": "ffn_gate_up_exps.bias",
        "experts.down_proj": "ffn_down_exps.weight",
        "experts.down_proj_bias": "ffn_down_exps.bias",
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    }.items():
        if parameter.endswith(end):
            return f"blk.{layer}.{theirs}"
    parameter = parameter.replace(".dt_bias", ".dt_proj.bias")
    parameter = parameter.replace("self_attn.sinks", "self_attn.sinks.weight")
    parameter = parameter.replace("e_score_correction_bias", "e_score_correction.bias")
    for known in (parameter, parameter.removeprefix("transformer.")):
        if (found := table.get_name(known, try_suffixes=(".weight", ".bias"))) is not None:
            return str(found)
    raise AssertionError(f"the format has no name for {parameter}")


def _add(writer: Any, name: str, data: np.ndarray, kind: str, floats: bool) -> None:
    small = any(part in name for part in ("norm", "ssm_conv", "shortconv.conv", "ffn_gate_inp"))
    which = gguf.GGMLQuantizationType[kind]
    small |= data.ndim < 2 or name.endswith(".bias")
    if small or data.shape[-1] % gguf.GGML_QUANT_SIZES[which][0] or kind == "F32":
        writer.add_tensor(name, data)
        return
    blocks = gguf.quantize(data, which)
    if floats:
        writer.add_tensor(name, gguf.dequantize(blocks, which).copy())
    else:
        writer.add_tensor(name, blocks, raw_dtype=which)
