"""GGUF files made with the `gguf` package from tiny models, for tests."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from archs import ARCHS, build

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def their_name(name: str) -> str:
    """The format's name of a parameter."""
    owner, _, part = name.rpartition(".")
    if owner.startswith("model.layers."):
        _, _, layer, inner = owner.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{part}"
    return f"{NAMES[owner]}.{part}"


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head's halves side by side, as llama.cpp has those of queries and keys."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    kinds: dict[str, str],
    arch: str = "llama",
    *,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    **sizes: int,
) -> Any:
    """A tiny model as a file, and the model itself with the values that the file's blocks stand
    for. kinds: the block type of weights with a name's end ("" is all others of two axes)."""
    from dataclasses import replace

    known = ARCHS[arch]
    model = build(replace(known, config={**known.config, **sizes}))
    config = model.config
    writer = gguf.GGUFWriter(path, known.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = config.hidden_size // config.num_attention_heads
    writer.add_key_length(getattr(config, "head_dim", None) or head)
    writer.add_value_length(getattr(config, "head_dim", None) or head)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tokenizer(writer, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = next((k for end, k in kinds.items() if end and name.endswith(end)), kinds[""])
            data = parameter.float().numpy()
            count = heads.get(name.split(".")[-2]) if known.model_type == "llama" else None
            if data.ndim > 1 and kind != "F32":
                which = gguf.GGMLQuantizationType[kind]
                blocks = gguf.quantize(data, which)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, which).copy()))
                laid = blocks if count is None else in_pairs(blocks, count)
                writer.add_tensor(their_name(name), laid, raw_dtype=which)
            else:
                laid = data if count is None else in_pairs(data, count)
                writer.add_tensor(their_name(name), np.ascontiguousarray(laid))
    known = model.model.rotary_emb.inv_freq.float()
    if (known != (plain := _frequencies(config, len(known)))).any():
        writer.add_tensor("rope_freqs.weight", (plain / known).numpy())
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _frequencies(config: Any, count: int) -> torch.Tensor:
    powers = torch.arange(count, dtype=torch.int64).float() / count
    return 1.0 / config.rope_parameters["rope_theta"] ** powers


def tokenizer(writer: Any, size: int) -> None:
    """A byte-level vocabulary of letters."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(33 + i) for i in range(94)), "ab", "cd"]
    tokens += [f"<extra{i}>" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b", "c d"])


def moved(raw: bytes, name: str, by: int) -> bytes:
    """A file of which a tensor's header says that it begins so many bytes further on."""
    key = struct.pack("<Q", len(name)) + name.encode()
    place = raw.index(key) + len(key)
    (axes,) = struct.unpack_from("<I", raw, place)
    place += 4 + 8 * axes + 4
    (start,) = struct.unpack_from("<Q", raw, place)
    return raw[:place] + struct.pack("<Q", start + by) + raw[place + 8 :]
