"""The architectures of GGUF files, a row each.

A row says which model of transformers computes the same, which options of its configuration the
metadata gives beside those that all have (`config.config_of`), and which tensors the format keeps
in another layout. Names of tensors come from the `gguf` package's table. Facts are those of
llama.cpp's loader and of its converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import options as of
from .metadata import Metadata

Options = Callable[[Metadata], dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """How the format keeps a tensor, if not as transformers does. kind: see `rows.LAYOUTS` and
    `tensors.laid`. sizes: what that takes, of a configuration."""

    kind: str
    sizes: Callable[[Any], tuple[int, ...]] = lambda config: ()


@dataclass(frozen=True)
class Architecture:
    """An architecture that is read.

    model_type: transformers' name. eps: its option for the norms' epsilon. centred: whether norms
    subtract the mean, so that their epsilon has another key. rotary: whether there is a rotary
    embedding. partial: whether it may be of the first channels of a head alone. divided: whether a
    tensor may hold divisors of its frequencies. window: whether layers may have a sliding window.
    inner: transformers' option for the width between an MLP's two products. options: others.
    layouts: by regular expressions over transformers' names.
    """

    model_type: str
    eps: str = "rms_norm_eps"
    centred: bool = False
    rotary: bool = True
    partial: bool = False
    divided: bool = False
    window: bool = False
    inner: str = "intermediate_size"
    experts: bool = False
    any_dim: bool = True
    attends: bool = True
    alike: bool = True
    options: Options = lambda meta: {}
    layouts: Mapping[str, Layout] = field(default_factory=dict)


_PAIRS = {
    r"\bq_proj\.": Layout("pairs", lambda config: (config.num_attention_heads,)),
    r"\bk_proj\.": Layout("pairs", lambda config: (config.num_key_value_heads,)),
}
"""Rows of queries and keys are in the order of pairs (2i, 2i+1), and of (i, i + half) here."""

_NORMS = {r"norm\.weight$": Layout("less one")}
"""The format keeps 1 + w, and the model adds the 1 itself."""


def _fused(config: Any) -> tuple[int, ...]:
    """All queries, all keys, all values; here those of one group of heads after the other."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_kv_heads", heads)
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        groups = 1
    return groups, heads // groups, config.hidden_size // heads


_FUSED = {r"query_key_value\.": Layout("grouped", _fused)}


_STATES = {
    r"\.A_log$": Layout("log of minus"),
    r"\.conv1d\.weight$": Layout("reshaped"),
    r"\.(D|norm\.weight)$": Layout("reshaped"),
}
_LATENT = {r"\.kv_b_proj\.weight$": Layout("latent")}
_OF_LAYER_NORM: dict[str, Any] = {"centred": True, "eps": "layer_norm_eps"}
_OF_GPT: dict[str, Any] = {"centred": True, "eps": "layer_norm_epsilon", "rotary": False}

ARCHITECTURES = {
    "arcee": Architecture("arcee", options=of.llama, layouts=_PAIRS),
    "bloom": Architecture("bloom", layouts=_FUSED, **_OF_GPT),
    "cohere2": Architecture(
        "cohere2",
        window=True,
        options=lambda meta: {**of.cohere(meta), **of.alternating(meta, 4, 4096)},
        **_OF_LAYER_NORM,
    ),
    "command-r": Architecture("cohere", options=of.cohere, **_OF_LAYER_NORM),
    "deepseek2": Architecture(
        "deepseek_v2", alike=False, experts=True, options=of.deepseek2, layouts=_LATENT
    ),
    "deepseek2 with sigmoids": Architecture(
        "deepseek_v3", alike=False, experts=True, options=of.deepseek3, layouts=_LATENT
    ),
    "ernie4_5": Architecture(
        "ernie4_5", options=lambda s: {"use_bias": s.has("blk.0.attn_q.bias")}
    ),
    "exaone4": Architecture("exaone4", divided=True, window=True, options=of.exaone4),
    "falcon": Architecture(
        "falcon",
        inner="ffn_hidden_size",
        any_dim=False,
        options=of.falcon,
        layouts=_FUSED,
        centred=True,
        eps="layer_norm_epsilon",
    ),
    "gemma": Architecture("gemma", layouts=_NORMS),
    "gemma2": Architecture("gemma2", window=True, options=of.gemma2, layouts=_NORMS),
    "gemma3": Architecture("gemma3_text", window=True, options=of.gemma3, layouts=_NORMS),
    "glm4": Architecture("glm4", partial=True, options=of.biases),
    "gpt-oss": Architecture(
        "gpt_oss",
        window=True,
        experts=True,
        options=of.gpt_oss,
        layouts={
            r"experts\.gate_up_proj": Layout("interleaved"),
            r"experts\.down_proj$": Layout("transposed"),
        },
    ),
    "gpt2": Architecture(
        "gpt2",
        inner="n_inner",
        layouts={r"(c_attn|c_proj|c_fc)\.weight$": Layout("transposed")},
        **_OF_GPT,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        partial=True,
        options=lambda meta: {"use_parallel_residual": meta.flag("use_parallel_residual", True)},
        layouts=_FUSED,
        **_OF_LAYER_NORM,
    ),
    "granite": Architecture("granite", options=of.granite, layouts=_PAIRS),
    "granitemoe": Architecture("granitemoe", experts=True, options=of.granite_moe, layouts=_PAIRS),
    "lfm2": Architecture(
        "lfm2",
        eps="norm_eps",
        attends=False,
        options=of.lfm2,
        layouts={r"conv\.conv\.weight$": Layout("reshaped")},
    ),
    "llama": Architecture("llama", divided=True, options=of.llama, layouts=_PAIRS),
    "llama of experts": Architecture("mixtral", experts=True, options=of.mixtral, layouts=_PAIRS),
    "mamba": Architecture(
        "mamba", alike=False, eps="layer_norm_epsilon", options=of.mamba, layouts=_STATES
    ),
    "mamba2": Architecture(
        "mamba2", alike=False, eps="layer_norm_epsilon", options=of.mamba2, layouts=_STATES
    ),
    "mpt": Architecture("mpt", options=of.mpt, **_OF_GPT),
    "nemotron": Architecture(
        "nemotron", partial=True, centred=True, eps="norm_eps", options=of.llama, layouts=_NORMS
    ),
    "olmo2": Architecture("olmo2", options=of.biases),
    "olmoe": Architecture("olmoe", experts=True, options=of.olmoe),
    "phi2": Architecture("phi", partial=True, **_OF_LAYER_NORM),
    "phi3": Architecture("phi3", partial=True, window=True, options=of.phi3),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe", experts=True, options=of.qwen2_moe),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", experts=True, options=of.qwen3_moe),
    "seed_oss": Architecture(
        "seed_oss",
        options=lambda meta: {
            **of.biases(meta),
            "attention_out_bias": meta.has("blk.0.attn_output.bias"),
        },
    ),
    "smollm3": Architecture("smollm3", options=of.llama, layouts=_PAIRS),
    "stablelm": Architecture(
        "stablelm",
        partial=True,
        options=lambda meta: {
            "use_parallel_residual": meta.flag("use_parallel_residual", True),
            "use_qkv_bias": meta.has("blk.0.attn_q.bias"),
        },
        **_OF_LAYER_NORM,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        centred=True,
        eps="norm_epsilon",
        options=lambda meta: {"use_bias": meta.has("blk.0.attn_q.bias"), "sliding_window": None},
    ),
    "t5": Architecture("t5", eps="layer_norm_epsilon", rotary=False, inner="d_ff", options=of.t5),
}
"""By the name that a file has in general.architecture."""
