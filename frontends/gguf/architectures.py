"""The architectures of GGUF files, a row each.

A row says which model of transformers computes the same, which options of its configuration the
metadata gives beside those that all have (`config.config_of`), and which tensors the format keeps
in another layout. Names of tensors come from the `gguf` package's table. Facts are those of
llama.cpp's loader and of its converter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import mixtures, recurrences
from . import options as of
from .layouts import LAID, ORDERS, Order
from .terms import Fixed, Present, Term


@dataclass(frozen=True)
class Layout:
    """How the format keeps a parameter, if not as transformers does. kind: see `layouts.ORDERS` and
    `layouts.LAID`; what has one of each is in that order first. sizes: what that takes, of a
    configuration. axis: of an order. several: of several tensors; one alone is as transformers'."""

    kind: str
    sizes: Callable[[Any], tuple[int, ...]] = lambda config: ()
    axis: int = 0
    several: bool = False


@dataclass(frozen=True)
class Architecture:
    """An architecture that is read.

    model_type: transformers' name. eps: its option for the norms' epsilon. centred: whether norms
    subtract the mean, so that their epsilon has another key. rotary: whether there is a rotary
    embedding. partial: whether it may be of the first channels of a head alone. divided: whether a
    tensor may hold divisors of its frequencies. window: whether layers may have a sliding window.
    inner: transformers' option for the width between an MLP's two products. options: others.
    layouts: by regular expressions over transformers' names. written: whether models of
    the type are written as such files; those that were one are in any case.
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
    options: tuple[Term, ...] = ()
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    written: bool = True

    def layout_of(self, name: str, config: Any, tensors: int = 1) -> tuple[str, tuple[int, ...]]:
        """How floats of a parameter are laid, its kind and sizes; "" if they lie as in
        transformers. tensors: how many of the file it is made of."""
        found = self._found(LAID, name, tensors)
        return ("", ()) if found is None else (found.kind, found.sizes(config))

    def order_of(self, name: str, config: Any, tensors: int = 1) -> Order | None:
        """The order of a parameter's rows or columns; None if it is transformers'."""
        found = self._found(ORDERS, name, tensors)
        return None if found is None else Order(found.kind, found.sizes(config), found.axis)

    def _found(self, kinds: Container[str], name: str, tensors: int) -> Layout | None:
        fitting = (
            layout
            for pattern, layout in self.layouts.items()
            if layout.kind in kinds and (tensors > 1 or not layout.several)
            if re.search(pattern, name)
        )
        return next(fitting, None)


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
    dim = config.hidden_size // heads
    return groups, heads // groups * dim, dim, dim


_FUSED = {r"query_key_value\.": Layout("grouped", _fused)}


def _by_head(config: Any) -> tuple[int, ...]:
    """Mamba 2 has a number for each head, in a column; Mamba one for each channel."""
    return (-1, 1) if config.model_type == "mamba2" else ()


_STATES = {
    r"\.A_log$": Layout("log of minus", _by_head),
    r"\.conv1d\.weight$": Layout("reshaped"),
    r"\.D$": Layout("reshaped", _by_head),
    r"\.mixer\.norm\.weight$": Layout("reshaped", lambda config: (config.n_groups, -1)),
}
_LATENT = {
    r"\.kv_b_proj\.weight$": Layout(
        "latent",
        lambda config: (config.num_attention_heads, config.qk_nope_head_dim),
        several=True,
    )
}


def _delta_heads(config: Any) -> tuple[int, int, int]:
    """Channels of all queries and keys, groups of heads, and heads of a group."""
    groups = config.linear_num_key_heads
    return (
        2 * groups * config.linear_key_head_dim,
        groups,
        config.linear_num_value_heads // groups,
    )


def _delta_parts(config: Any) -> tuple[int, ...]:
    """Groups, and rows of a group's queries, keys, values and gates."""
    _, groups, each = _delta_heads(config)
    keys, values = config.linear_key_head_dim, each * config.linear_value_head_dim
    return groups, keys, keys, values, values


_SHARED_GATE = {r"\.shared_expert_gate\.weight$": Layout("reshaped")}
"""One row, of which llama.cpp makes a vector when it stores a file's weights in fewer bits."""

_DELTA = {
    **_SHARED_GATE,
    r"(?<!linear_attn\.)norm\.weight$": Layout("less one"),
    r"\.A_log$": Layout("log of minus"),
    r"\.conv1d\.weight$": Layout("reshaped"),
}
_DELTA_IN_TURNS = {
    **_DELTA,
    r"\.(in_proj_qkv|conv1d)\.": Layout("in turns", _delta_heads),
    r"\.(in_proj_[abz]\.|A_log$|dt_bias$)": Layout("in turns", lambda c: (0, *_delta_heads(c)[1:])),
    r"linear_attn\.out_proj\.": Layout("in turns", lambda c: (0, *_delta_heads(c)[1:]), axis=1),
}
"""Heads of values are those of a group side by side; the format's are a group's number apart."""

_OF_LAYER_NORM: dict[str, Any] = {"centred": True, "eps": "layer_norm_eps"}
_OF_GPT: dict[str, Any] = {"centred": True, "eps": "layer_norm_epsilon", "rotary": False}

ARCHITECTURES = {
    "arcee": Architecture("arcee", options=of.LLAMA, layouts=_PAIRS),
    "bloom": Architecture("bloom", layouts=_FUSED, **_OF_GPT),
    "cohere2": Architecture(
        "cohere2",
        window=True,
        options=of.COHERE2,
        **_OF_LAYER_NORM,
    ),
    "command-r": Architecture("cohere", options=of.COHERE, **_OF_LAYER_NORM),
    "deepseek2": Architecture(
        "deepseek_v2", alike=False, experts=True, options=mixtures.DEEPSEEK2, layouts=_LATENT
    ),
    "deepseek2 with sigmoids": Architecture(
        "deepseek_v3", alike=False, experts=True, options=mixtures.DEEPSEEK3, layouts=_LATENT
    ),
    "ernie4_5": Architecture("ernie4_5", options=(Present("use_bias", "blk.0.attn_q.bias"),)),
    "exaone": Architecture("llama", divided=True, written=False),
    "exaone4": Architecture("exaone4", divided=True, window=True, options=of.EXAONE4),
    "falcon": Architecture(
        "falcon",
        inner="ffn_hidden_size",
        any_dim=False,
        options=of.FALCON,
        layouts=_FUSED,
        centred=True,
        eps="layer_norm_epsilon",
    ),
    "gemma": Architecture("gemma", layouts=_NORMS),
    "gemma2": Architecture("gemma2", window=True, options=of.GEMMA2, layouts=_NORMS),
    "gemma3": Architecture("gemma3_text", window=True, options=of.GEMMA3, layouts=_NORMS),
    "glm4": Architecture("glm4", partial=True, options=(of.ATTENTION_BIAS,)),
    "gpt-oss": Architecture(
        "gpt_oss",
        window=True,
        experts=True,
        options=mixtures.GPT_OSS,
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
        options=(of.PARALLEL,),
        layouts=_FUSED,
        **_OF_LAYER_NORM,
    ),
    "granite": Architecture("granite", options=of.GRANITE, layouts=_PAIRS),
    "granitemoe": Architecture(
        "granitemoe", experts=True, options=mixtures.GRANITE_MOE, layouts=_PAIRS
    ),
    "lfm2": Architecture(
        "lfm2",
        eps="norm_eps",
        attends=False,
        options=recurrences.LFM2,
        layouts={r"conv\.conv\.weight$": Layout("reshaped")},
    ),
    "llama": Architecture("llama", divided=True, options=of.LLAMA, layouts=_PAIRS),
    "llama of experts": Architecture(
        "mixtral", experts=True, options=mixtures.MIXTRAL, layouts=_PAIRS
    ),
    "mamba": Architecture(
        "mamba", alike=False, eps="layer_norm_epsilon", options=recurrences.MAMBA, layouts=_STATES
    ),
    "mamba2": Architecture(
        "mamba2", alike=False, eps="layer_norm_epsilon", options=recurrences.MAMBA2, layouts=_STATES
    ),
    "mistral3": Architecture("ministral3", options=of.MISTRAL3, layouts=_PAIRS),
    "mpt": Architecture("mpt", options=of.MPT, **_OF_GPT),
    "nemotron": Architecture(
        "nemotron", partial=True, centred=True, eps="norm_eps", options=of.LLAMA, layouts=_NORMS
    ),
    "olmo2": Architecture("olmo2", options=(of.ATTENTION_BIAS,)),
    "olmoe": Architecture("olmoe", experts=True, options=mixtures.OLMOE),
    "phi2": Architecture("phi", partial=True, **_OF_LAYER_NORM),
    "phi3": Architecture("phi3", partial=True, window=True, options=of.PHI3),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe", experts=True, options=mixtures.QWEN2_MOE, layouts=_SHARED_GATE
    ),
    "qwen3": Architecture("qwen3"),
    "qwen35": Architecture(
        "qwen3_5_text", partial=True, options=recurrences.QWEN35, layouts=_DELTA_IN_TURNS
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        partial=True,
        experts=True,
        inner="moe_intermediate_size",
        options=recurrences.QWEN35_MOE,
        layouts=_DELTA_IN_TURNS,
    ),
    "qwen3moe": Architecture("qwen3_moe", experts=True, options=mixtures.QWEN3_MOE),
    "qwen3next": Architecture(
        "qwen3_next",
        partial=True,
        experts=True,
        options=recurrences.QWEN3_NEXT,
        layouts={
            **_DELTA,
            r"\.in_proj_qkvz\.": Layout("grouped with gates", _delta_parts, several=True),
        },
    ),
    "seed_oss": Architecture(
        "seed_oss",
        options=(of.ATTENTION_BIAS, Present("attention_out_bias", "blk.0.attn_output.bias")),
    ),
    "smollm3": Architecture("smollm3", options=of.LLAMA, layouts=_PAIRS),
    "stablelm": Architecture(
        "stablelm",
        partial=True,
        options=(of.PARALLEL, Present("use_qkv_bias", "blk.0.attn_q.bias")),
        **_OF_LAYER_NORM,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        centred=True,
        eps="norm_epsilon",
        options=(Present("use_bias", "blk.0.attn_q.bias"), Fixed({"sliding_window": None})),
    ),
    "t5": Architecture(
        "t5", eps="layer_norm_epsilon", rotary=False, inner="d_ff", options=of.T5, written=False
    ),
}
"""By the name that a file has in general.architecture."""
