"""How llama.cpp's converter lays tensors, by the format's names of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf_files import in_pairs


def pairs(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2]
    yield name, in_pairs(data, heads[part]) if part in heads else data


def plus_one(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield name, data + 1 if name.endswith("norm.weight") else data


def apart(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """GPT-NeoX's and Bloom's queries, keys and values: of each head here, of all heads there."""
    if "attn_qkv" in name:
        heads = config.num_attention_heads
        data = data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
    yield name, data


def falcon(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
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


def gpt2(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    ends = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    yield name, data.T if name.endswith(ends) else data


def experts(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "gate_up_exps" in name:
        half = data.shape[1] // 2
        yield name.replace("gate_up", "gate"), data[:, :half]
        yield name.replace("gate_up", "up"), data[:, half:]
    else:  # of a weight of one row llama.cpp makes a vector when it quantizes a file
        yield name, data.squeeze(0) if "inp_shexp" in name else data


def mixtral(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    for other, part in experts(name, data, config):
        yield from pairs(other, part, config)


def gpt_oss(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "gate_up_exps" in name:
        rows = data if data.ndim == 2 else data.swapaxes(1, 2)
        yield name.replace("gate_up", "gate"), rows[:, 0::2]
        yield name.replace("gate_up", "up"), rows[:, 1::2]
    else:
        yield name, data.swapaxes(1, 2) if name.endswith("down_exps.weight") else data


def squeezed(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    yield name, data.squeeze(1) if "conv" in name and data.ndim == 3 else data


def mamba(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("ssm_a"):
        data = -np.exp(data)
    if config.model_type == "mamba2":
        if name.endswith(("ssm_a", "ssm_d")):
            data = data.reshape(-1, 1)
        if "ssm_norm" in name:
            data = data.reshape(config.n_groups, -1)
    yield from squeezed(name, data, config)


def delta_norms(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Norms add 1 but those of the recurrence; convolutions and signs as Mamba's."""
    if not name.endswith("ssm_norm.weight"):
        ((name, data),) = plus_one(name, data, config)
    for part in mamba(name, data, config):
        yield from experts(*part, config)


def delta_groups(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Queries, keys, values and gates of each group here, of all groups there."""
    if "ssm_in" not in name:
        yield from delta_norms(name, data, config)
        return
    groups, dim = config.linear_num_key_heads, config.linear_key_head_dim
    each = config.linear_num_value_heads // groups * config.linear_value_head_dim
    by = data.reshape(groups, 2 * dim + 2 * each, -1)
    parts = np.split(by, [dim, 2 * dim, 2 * dim + each], axis=1)
    queries, keys, values, gates = (part.reshape(-1, data.shape[1]) for part in parts)
    yield name.replace("ssm_in", "attn_qkv"), np.concatenate([queries, keys, values])
    yield name.replace("ssm_in", "attn_gate"), gates


def delta_heads(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """A head's values are at 2 * group + head here, at groups * head + group there."""
    groups, keys = config.linear_num_key_heads, config.linear_key_head_dim
    part = name.split(".", 2)[-1].split(".")[0]
    if part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        data = heads_in_turns(data, groups)
    elif part in ("attn_qkv", "ssm_conv1d"):
        queries_and_keys, values = np.split(data, [2 * groups * keys])
        data = np.concatenate([queries_and_keys, heads_in_turns(values, groups)])
    elif part == "ssm_out":
        data = heads_in_turns(data.T, groups).T
    yield from delta_norms(name, data, config)


def heads_in_turns(data: np.ndarray, groups: int) -> np.ndarray:
    heads = data.reshape(groups, 2, -1)
    return heads.swapaxes(0, 1).reshape(data.shape)


def latent_heads(name: str, data: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    if "attn_kv_b" in name:
        heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        yield name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), values
    else:
        yield from experts(name, data, config)
