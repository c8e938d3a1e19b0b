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
from gguf_files import in_pairs, tokenizer
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


def _pairs(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    yield name, in_pairs(data, heads[part]) if part in heads else data


def _plus_one(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield name, data + 1 if name.endswith("norm.weight") else data


def _apart(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """GPT-NeoX's and Bloom's queries, keys and values: of each head here, of all heads there."""
    if "attn_qkv" in name:
        heads = config.num_attention_heads
        data = data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
    yield name, data


def _falcon(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "attn_qkv" in name:
        heads = config.num_attention_heads
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        if not config.multi_query and not config.new_decoder_architecture:
            groups = heads
        dim = config.hidden_size // heads
        by = data.reshape(groups, heads // groups + 2, dim, -1)
        data = np.concatenate(
            [
                by[:, :-2].reshape(-1, data.shape[1]),
                by[:, -2].reshape(-1, data.shape[1]),
                by[:, -1].reshape(-1, data.shape[1]),
            ]
        )
    yield name, data


def _gpt2(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    ends = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    yield name, data.T if name.endswith(ends) else data


def _experts(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "gate_up_exps" in name:
        half = data.shape[1] // 2
        yield name.replace("gate_up", "gate"), data[:, :half]
        yield name.replace("gate_up", "up"), data[:, half:]
    else:
        yield name, data


def _mixtral(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    for other, part in _experts(name, data, config):
        yield from _pairs(other, part, config)


def _gpt_oss(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "gate_up_exps" in name:
        rows = data if data.ndim == 2 else data.swapaxes(1, 2)
        yield name.replace("gate_up", "gate"), rows[:, 0::2]
        yield name.replace("gate_up", "up"), rows[:, 1::2]
    else:
        yield name, data.swapaxes(1, 2) if name.endswith("down_exps.weight") else data


def _squeezed(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield name, data.squeeze(1) if "conv" in name and data.ndim == 3 else data


def _mamba(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("ssm_a"):
        data = -np.exp(data)
    if config.model_type == "mamba2":
        if name.endswith(("ssm_a", "ssm_d")):
            data = data.reshape(-1, 1)
        if "ssm_norm" in name:
            data = data.reshape(config.n_groups, -1)
    yield from _squeezed(name, data, config)


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


def _latent_heads(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "attn_kv_b" in name:
        heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield from _experts(name, data, config)


_SIX = ["sliding_attention"] * 5 + ["full_attention"]

FILES: dict[str, Written] = {
    "arcee": Written("arcee", move=_pairs),
    "bloom": Written("bloom", move=_apart),
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
        "deepseek_v2", _latent, _latent_heads, {"topk_method": "greedy", "n_group": 1}
    ),
    "deepseek2 (v3)": Written("deepseek_v3", _latent, _latent_heads, {"n_group": 1}),
    "ernie4_5": Written("ernie4_5", change={"use_bias": False}),
    "exaone": Written(
        "llama", change={"rope_parameters": None, "attention_bias": False, "mlp_bias": False}
    ),
    "exaone4": Written("exaone4", change={"sliding_window": None, "layer_types": None}),
    "exaone4 (32b)": Written(
        "exaone4", _window, change={"num_hidden_layers": 4, "layer_types": None}
    ),
    "falcon": Written("falcon", move=_falcon),
    "falcon (7b)": Written("falcon-multi-query", lambda c: {"attention.head_count_kv": 1}, _falcon),
    "gemma": Written("gemma", move=_plus_one),
    "gemma2": Written("gemma2", _soft_caps, _plus_one, {"query_pre_attn_scalar": 16}),
    "gemma3": Written(
        "gemma3_text",
        lambda c: {"final_logit_softcapping": c.final_logit_softcapping, **_window(c)},
        _plus_one,
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
        _gpt_oss,
    ),
    "gpt2": Written("gpt2", move=_gpt2),
    "gptneox": Written(
        "gpt_neox",
        lambda c: {**_partial(c), "use_parallel_residual": c.use_parallel_residual},
        _apart,
    ),
    "granite": Written("granite", _granite, _pairs),
    "granitemoe": Written("granitemoe", lambda c: {**_granite(c), **_mixture(c)}, _mixtral),
    "lfm2": Written(
        "lfm2",
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "attention.head_count_kv": [
                c.num_key_value_heads if t == "full_attention" else 0 for t in c.layer_types
            ],
        },
        _squeezed,
        {"block_auto_adjust_ff_dim": False},
    ),
    "llama": Written("llama", move=_pairs, change={"rope_parameters": None}),
    "llama (yarn)": Written("llama-tied-yarn", _yarn, _pairs),
    "llama (experts)": Written("mixtral", _mixture, _mixtral, {"sliding_window": None}),
    "mamba": Written("mamba", _ssm, _mamba, {"intermediate_size": 128}),
    "mamba2": Written("mamba2", _ssm, _mamba, {"head_dim": 16}),
    "mistral3": Written("ministral3", _by_position, _pairs),
    "mpt": Written("mpt", _mpt),
    "nemotron": Written("nemotron", _partial, _plus_one, {"head_dim": 16}),
    "olmo2": Written("olmo2"),
    "olmoe": Written("olmoe", _mixture, _experts, {"clip_qkv": None, "num_key_value_heads": 4}),
    "phi2": Written("phi", _partial, change={"qk_layernorm": False}),
    "phi3": Written("phi3", _partial, change={"sliding_window": None}),
    "phi3 (window)": Written("phi3", lambda c: {**_window(c), **_partial(c)}),
    "qwen2": Written("qwen2", change={"use_sliding_window": False, "layer_types": None}),
    "qwen2moe": Written(
        "qwen2_moe",
        _mixture,
        _experts,
        {"mlp_only_layers": [], "use_sliding_window": False, "layer_types": None},
    ),
    "qwen3": Written("qwen3", change={"use_sliding_window": False, "layer_types": None}),
    "qwen3moe": Written(
        "qwen3_moe",
        _mixture,
        _experts,
        {"mlp_only_layers": [], "norm_topk_prob": True, "use_sliding_window": False},
    ),
    "seed_oss": Written("seed_oss", change={"attention_out_bias": False}),
    "smollm3": Written(
        "smollm3",
        move=_pairs,
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
    parameter = parameter.replace("mixer.dt_bias", "mixer.dt_proj.bias")
    parameter = parameter.replace("self_attn.sinks", "self_attn.sinks.weight")
    parameter = parameter.replace("e_score_correction_bias", "e_score_correction.bias")
    for known in (parameter, parameter.removeprefix("transformer.")):
        if (found := table.get_name(known, try_suffixes=(".weight", ".bias"))) is not None:
            return str(found)
    raise AssertionError(f"the format has no name for {parameter}")


def _add(writer: Any, name: str, data: np.ndarray, kind: str, floats: bool) -> None:
    small = any(part in name for part in ("norm", "ssm_", "shortconv.conv", "ffn_gate_inp"))
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
