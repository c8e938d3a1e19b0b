"""A llama of two layers with random weights, for comparisons with transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama(vocabulary: int, end: int, **others: Any) -> LlamaForCausalLM:
    """others: of `LlamaConfig`."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": end}
    plain = {**sizes, **heads, **tokens, "pad_token_id": None, "initializer_range": 0.3}
    return LlamaForCausalLM(LlamaConfig(**{**plain, **others})).eval()
