"""What a GGUF file says of a model of transformers: the rows of `architectures`, from their other
side.

Whether the format can say all of a configuration is found by reading what is written: the options
that come back are compared with those that were given, and one that differs is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose
from pathlib import Path
from typing import Any

import torch

from ...ir import UnsupportedError
from ...ir.support.names import shown
from .architectures import ARCHITECTURES, Architecture
from .config import config_of
from .metadata import Metadata
from .options import rotary_entries
from .reader import Entry, GgufFile
from .terms import Entries, write_all

_UNSAID = re.compile(
    r"""_name_or_path|architectures|auto_map|id2label|label2id|transformers_version|task_.*
    |(torch_)?dtype|(.*_)?token_ids?|begin_suppress_tokens|suppress_tokens|is_(en)?coder.*|is_decoder
    |use_cache|output_.*|return_.*|chunk_size_.*|max_window_layers|tie_(word_embeddings|encoder_.*)
    |.*drop(out)?(_rate|_prob|_p)?|.*initializer.*|.*_aux_.*|.*jitter.*|.*_std|rescale_prenorm_.*
    |time_step_(min|max|floor|init_scheme|scale)|pretraining_tp|num_nextn_predict_layers
    |cache_implementation|layernorm_eps_unused|attn_implementation|experts_implementation
    |use_sliding_window|sliding_window_pattern|chunk_size
    |chat_template|quantization_config|problem_type|finetuning_task|gradient_checkpointing
    |use_mambapy|summary_.*|scale_attn_.*_unused|head_type|dual_chunk.*|default_theta|mrope_.*""",
    re.VERBOSE,
)
"""Options that change no logits, or that others say again: names, training, ids (which the
tokenizer's entries say), windows (layer_types), contexts before scaling (rope_parameters), and
sections of pictures' positions."""


_IDS = "bos", "eos", "pad"


def row_of(model_type: str) -> tuple[str, Architecture]:
    """The name that files of a model type have in general.architecture, and its row.

    Errors: `UnsupportedError` for a type that has none.
    """
    for name, row in ARCHITECTURES.items():
        if row.model_type == model_type and row.written:
            return name.partition(" ")[0], row
    known = ", ".join(sorted(row.model_type for row in ARCHITECTURES.values() if row.written))
    raise UnsupportedError(f"GGUF files of {model_type} models are not written: expected {known}")


def entries_of(known: Architecture, config: Any, context: int) -> Entries:
    """Entries of the architecture by a configuration. context: tokens."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    norm = "layer_norm_epsilon" if known.centred else "layer_norm_rms_epsilon"
    found: Entries = {
        "context_length": getattr(config, "max_position_embeddings", None) or context,
        "embedding_length": hidden,
        "block_count": layers,
        "vocab_size": config.vocab_size,
        f"attention.{norm}": float(getattr(config, known.eps, 1e-5)),
    }
    if known.alike:
        found |= _attention(known, config, found["context_length"])
    return {**found, **write_all(known.options, config)}


def _attention(known: Architecture, config: Any, context: int) -> Entries:
    heads, hidden = config.num_attention_heads, config.hidden_size
    dim = getattr(config, "head_dim", None) or hidden // heads
    found: Entries = {
        "feed_forward_length": getattr(config, known.inner, None) or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
    }
    rope = getattr(config, "rope_parameters", None)
    if known.rotary and rope:
        part = rope.get("partial_rotary_factor", 1.0) if known.partial else 1.0
        found["rope.dimension_count"] = int(dim * part)
        found |= rotary_entries(rope, context) if "rope_theta" in rope else {}
    return found


@dataclass(frozen=True)
class Unwritten(GgufFile):
    """A file that is not written yet. vectors: its tensors that metadata is made of."""

    vectors: Mapping[str, list[float]] = field(default_factory=dict)

    def rows(self, entry: Entry, width: int) -> torch.Tensor:
        """As of a file that is."""
        return torch.tensor(self.vectors[entry.name]).view(torch.uint8).reshape(-1, width)


def check_said(
    path: Path, known: Architecture, config: Any, entries: Entries, dims: Mapping[str, Any]
) -> Any:
    """The configuration that a reader makes of entries of metadata (under their whole names) and
    tensors of these dims.

    Errors: `UnsupportedError` for an option of `config` that the file would not say.
    """
    from transformers import AutoConfig

    vectors = {name: value for name, value in entries.items() if name.endswith(".weight")}
    said = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entries.items()
        if name not in vectors
    }
    tensors = {name: Entry(name, tuple(map(int, size)), 0, 0) for name, size in dims.items()}
    tensors |= {name: Entry(name, (len(vector),), 0, 0) for name, vector in vectors.items()}
    meta = Metadata(Unwritten(path, said, tensors, 0, 32, vectors=vectors))
    ids = {f"{role}_token_id": getattr(config, f"{role}_token_id", None) for role in _IDS}
    found = AutoConfig.for_model(known.model_type, **config_of(meta), **ids)
    for option, (given, back) in _differing(known, config, found).items():
        raise UnsupportedError(
            f"config.json: {option} is {shown(given)}, and GGUF's {meta.name} models are read with "
            f"{shown(back)}: the format has no place for it"
        )
    return found


def _differing(known: Architecture, config: Any, found: Any) -> dict[str, tuple[Any, Any]]:
    """Options that are not as they were, of those that such configurations have."""
    given, back = _settled(known, config), _settled(known, found)
    names = [name for name in type(config)().to_dict() if not _UNSAID.fullmatch(name)]
    both = {name: (given.get(name), back.get(name)) for name in names}
    return {name: pair for name, pair in both.items() if not _same(*pair)}


def _settled(known: Architecture, config: Any) -> dict[str, Any]:
    """Options, with the values that are taken where there are none."""
    options = dict(config.to_dict())
    heads = getattr(config, "num_attention_heads", 0)
    if known.alike and heads:
        options[known.inner] = getattr(config, known.inner, None) or 4 * config.hidden_size
        options["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // heads
        options["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
    if "sliding_attention" not in (options.get("layer_types") or ["sliding_attention"]):
        options["sliding_window"] = None
    rope = options.get("rope_parameters") or {}
    if known.divided and rope.get("rope_type") == "llama3":  # a tensor of the file has them
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    options.pop(
        "original_max_position_embeddings", None
    )  # rope_parameters have it, where it counts
    return options


_TAKEN: Mapping[str, Any] = {
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0},
    **{"truncate": True, "partial_rotary_factor": 1.0},
}
"""Options of rotary embeddings where there are none."""


def _same(given: Any, back: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(back, Mapping):
        names = [name for name in {**given, **back} if not _UNSAID.fullmatch(name)]
        return all(_same(*(one.get(n, _TAKEN.get(n)) for one in (given, back))) for n in names)
    if isinstance(given, (list, tuple)) and isinstance(back, (list, tuple)):
        return len(given) == len(back) and all(map(_same, given, back))
    if isinstance(given, float) or isinstance(back, float):
        numbers = all(isinstance(one, (int, float)) for one in (given, back))
        return numbers and isclose(given, back, rel_tol=1e-6)
    return bool(given == back)
