"""What a GGUF file's metadata says of its model, as a configuration of transformers.

Keys of an architecture (``llama.*``) say how its model computes, and llama.cpp knows many that the
models here have no place for. So every key is either read, or changes nothing at all (`SILENT`), or
changes nothing at the value that it has (`_NEUTRAL`), or is refused by name. Meanings are those of
llama.cpp's loader: a rope factor without a type is linear, one of zero is none, and counts may be
arrays with an entry for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isclose, isfinite
from typing import Any, TypeVar

import torch

from ...ir import InputError, UnsupportedError
from ...ir.support.names import shown
from .architectures import ARCHITECTURES, Architecture
from .reader import Entry, GgufFile, Value

T = TypeVar("T", int, float)

SILENT = {
    "attention.layer_norm_epsilon",  # norms of one kind have one epsilon: the other is not used
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window_pattern",  # which layers have the window
    "classifier.output_labels",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # this and the betas: of YaRN alone
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",  # the table of tokens says it
}

_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.group_norm_epsilon": (0,),
    "attention.group_norm_groups": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "hidden_activation": ("silu", "swiglu"),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "ssm.group_count": (0,),
    "use_parallel_residual": (False,),
}


class Metadata:
    """The metadata that a configuration is made of, and what of it was read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))
        self.read = {"expert_count"}

    def architecture(self) -> Architecture:
        """Errors: `UnsupportedError` for another than those that are read."""
        if self.name not in ARCHITECTURES:
            raise UnsupportedError(
                f"{self.file.path}: general.architecture: expected one of "
                f"{', '.join(n for n in ARCHITECTURES if ' ' not in n)}, got {shown(self.name)}"
            )
        if not self.number("expert_count", int, 0):
            return ARCHITECTURES[self.name]
        sigmoids = any(name.endswith(".exp_probs_b.bias") for name in self.file.tensors)
        special = f"{self.name} with sigmoids" if sigmoids else f"{self.name} of experts"
        found = ARCHITECTURES.get(special, ARCHITECTURES[self.name])
        if not found.experts:
            raise UnsupportedError(
                f"{self.file.path}: {self.name} models with experts are not supported"
            )
        return found

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """An entry of the architecture, which counts as read."""
        self.read.add(key)
        return self.file.metadata.get(f"{self.name}.{key}", default)

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor."""
        return tensor in self.file.tensors

    def size(self, tensor: str, default: int) -> int:
        """Rows of a tensor."""
        entry = self.file.tensors.get(tensor)
        return default if entry is None else entry.dims[0]

    def floats(self, tensor: str) -> list[float]:
        """A vector of float32 that the file has. Errors: `InputError`."""
        entry = self.file.tensors.get(tensor)
        if entry is None or entry.kind != 0 or len(entry.dims) != 1:
            raise self._no_model(f"tensor {tensor}: expected f32 of one axis")
        values = self.file.owner(tensor).rows(Entry(tensor, (entry.dims[0], 1), 0, entry.start), 4)
        found: list[float] = values.view(torch.float32).flatten().tolist()
        if not all(isfinite(value) and value > 0 for value in found):
            raise InputError(f"{self.file.path}: tensor {tensor}: expected positive numbers")
        return found

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """An entry of the architecture. Errors: `InputError` if it is missing or no number."""
        return self._number(f"{self.name}.{key}", kind, self.get(key, default))

    def _number(self, whole: str, kind: type[T], found: Value | None) -> T:
        accepted = (int,) if kind is int else (int, float)
        if isinstance(found, bool) or not isinstance(found, accepted) or not 0 <= found < 2**40:
            raise InputError(
                f"{self.file.path}: {whole}: expected a number, got "
                f"{'nothing' if found is None else shown(found)}"
            )
        return kind(found)

    def flag(self, key: str, default: bool) -> bool:
        """An entry of the architecture that is true or false. Errors: `InputError`."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise InputError(
                f"{self.file.path}: {self.name}.{key}: expected true or false, got {shown(found)}"
            )
        return found

    def counts(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """A number for each layer: one for all, or an array. Errors: `InputError`."""
        found, whole = self.get(key), f"{self.name}.{key}"
        layers = self.number("block_count", int)
        if not isinstance(found, tuple):
            return (self.number(key, int, default),) * min(layers, len(self.file.tensors) + 1)
        if len(found) != layers or not found:
            raise InputError(
                f"{self.file.path}: {whole} has {len(found)} entries; expected one for each of "
                f"{layers} layers"
            )
        return tuple(self._number(whole, int, value) for value in found)

    def count(self, key: str, default: int | None = None) -> int:
        """A number that is the same for all layers.

        Errors: `InputError` if it is neither that nor an array with an entry for each,
        `UnsupportedError` if layers differ."""
        if not isinstance(self.get(key), tuple):
            return self.number(key, int, default)
        found = self.counts(key)
        if len(set(found)) != 1:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.{key} differs from layer to layer "
                f"({shown(found)}), and {self.name} models are read with layers that are alike"
            )
        return found[0]

    def config(self) -> dict[str, Any]:
        """Options of transformers' configuration. Errors: `InputError` for numbers that do not fit
        each other or the tensors, `UnsupportedError` for what has no place in such a model."""
        known = self.architecture()
        layers, hidden = self.number("block_count", int), self.number("embedding_length", int)
        context = self.number("context_length", int)
        self._expect("embedding_length_out", hidden, "as the embedding has")
        self._check_layers(layers, hidden)
        norm = "layer_norm_epsilon" if known.centred else "layer_norm_rms_epsilon"
        found: dict[str, Any] = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "vocab_size": self.file.tensors["token_embd.weight"].dims[0],
            "max_position_embeddings": context,
            known.eps: self.number(f"attention.{norm}", float),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "dtype": "float32",
            **self._tokens(),
        }
        if not 0 < context < 2**31:
            raise self._no_model(f"{self.name}.context_length is {context}")
        if known.alike:
            found |= self._attention(known, hidden, context)
        found |= known.options(self)
        self._refuse_others()
        return found

    def _attention(self, known: Architecture, hidden: int, context: int) -> dict[str, Any]:
        """Options of attention and of the MLP behind it."""
        heads = self.count("attention.head_count")
        key = "attention.head_count_kv"  # 0 in layers that have no attention
        groups = self.count(key, heads) if known.attends else max(self.counts(key, heads))
        if not heads or not hidden or not groups or heads % groups:
            raise self._no_model(f"{heads} heads over {groups} of {hidden} channels are no model")
        dim = self.number("attention.key_length", int, hidden // heads)
        self._expect("attention.value_length", dim, "as keys have")
        inner = self.count("feed_forward_length", 0)
        self._check_rows(hidden, (heads * dim, groups * dim, inner))
        found: dict[str, Any] = {
            known.inner: inner,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
        }
        if known.any_dim:
            found["head_dim"] = dim
        else:
            self._expect("attention.key_length", hidden // heads, "as many as all heads share")
        if known.rotary:
            found["rope_parameters"] = self._rope(known, dim)
        if not known.window and 0 < (window := self.count("attention.sliding_window", 0)) < context:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.attention.sliding_window={window}: expected none, "
                f"or the whole context of {context} tokens"
            )
        self._check_scale(known, dim)
        return found

    def _rope(self, known: Architecture, dim: int) -> dict[str, Any]:
        if not dim or dim % 2:
            raise self._no_model(f"heads of {dim} channels have no rotary embedding")
        if not known.partial:
            self._expect("rope.dimension_count", dim, "as keys have")
            return self.rotary()
        turned = self.number("rope.dimension_count", int, dim)
        if not 0 < turned <= dim or turned % 2:
            raise self._no_model(f"{turned} of {dim} channels have no rotary embedding")
        return {**self.rotary(), "partial_rotary_factor": turned / dim}

    def rotary(self, *, scaled: bool = True) -> dict[str, Any]:
        """The rotary embedding's base and, if `scaled`, how its frequencies are scaled."""
        base = self.number("rope.freq_base", float, 10000.0)
        if not base:
            raise self._no_model(f"{self.name}.rope.freq_base is 0")
        kind = self.get("rope.scaling.type", "linear")
        if not scaled:
            return {"rope_type": "default", "rope_theta": base}
        if kind not in ("none", "linear", "yarn"):
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.rope.scaling.type: expected none, linear or yarn, "
                f"got {shown(kind)}"
            )
        old = self.number("rope.scale_linear", float, 0.0)  # what the factor was called once
        factor = self.number("rope.scaling.factor", float, old)
        if kind == "none" or factor in (0.0, 1.0):
            return {"rope_type": "default", "rope_theta": base}
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": base, "factor": factor}
        context = self.number("context_length", int)
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", float, 1.0),
            "original_max_position_embeddings": self.number(
                "rope.scaling.original_context_length", int, 0
            )
            or context,
        }

    def plain_scale(self) -> float:
        """What scores are multiplied by if nothing else is said."""
        heads, hidden = self.count("attention.head_count"), self.number("embedding_length", int)
        return float(self.number("attention.key_length", int, hidden // heads) ** -0.5)

    def _check_scale(self, known: Architecture, dim: int) -> None:
        """Errors: `UnsupportedError` for a scale of scores that the model cannot be given."""
        scale, plain = self.number("attention.scale", float, 0.0), dim**-0.5
        if known.model_type in _SCALED or not scale or isclose(scale, plain, rel_tol=1e-5):
            return
        raise self.unlike("attention.scale", scale, plain)

    def unlike(self, key: str, given: Any, wanted: Any) -> UnsupportedError:
        """The error for an entry that has no place in the model."""
        return UnsupportedError(f"{self.file.path}: {self.name}.{key}={given}: expected {wanted}")

    def _refuse_others(self) -> None:
        """Errors: `UnsupportedError` for a key that may change what the model computes."""
        for whole, value in self.file.metadata.items():
            key = whole.removeprefix(f"{self.name}.")
            neutral = _NEUTRAL.get(key, ())
            same = any(
                value == v and isinstance(value, bool) is isinstance(v, bool) for v in neutral
            )
            if key == whole or key in self.read or key in SILENT or same:
                continue
            fine = " or ".join(map(repr, neutral))
            raise UnsupportedError(
                f"{self.file.path}: {whole} is {shown(value)}, and {self.name} models are read "
                f"{f'with {fine}' if fine else 'without that'}: it may change what the model "
                f"computes. If it does not, take the key away (gguf-new-metadata "
                f"--remove-metadata {whole})"
            )

    def _no_model(self, what: str) -> InputError:
        return InputError(f"{self.file.path}: {what}; fetch the file again")

    def _expect(self, key: str, wanted: int, why: str) -> None:
        if (given := self.number(key, int, wanted)) != wanted:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.{key}={given}: expected {wanted}, {why}"
            )

    def _check_layers(self, layers: int, hidden: int) -> None:
        """That the file has as many layers as it says, and a table of as many channels: before a
        model of that many is made."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.dims) != 2:
            raise self._no_model("it holds no table token_embd.weight of two axes")
        if table.dims[1] != hidden:
            raise self._no_model(
                f"tensor token_embd.weight has rows of {table.dims[1]} channels, and "
                f"{self.name}.embedding_length is {hidden}"
            )
        there = {int(m[1]) for m in map(_LAYER.match, self.file.tensors) if m}
        if not layers or len(there) != layers or there != set(range(layers)):
            raise self._no_model(
                f"{self.name}.block_count is {layers}, and the file has tensors of {len(there)} "
                f"layers{f', the last of them {max(there)}' if there else ''}"
            )

    def _check_rows(self, hidden: int, rows: tuple[int, int, int]) -> None:
        """That the first layer has the sizes of the metadata. rows: of queries, of keys, and of the
        layer between two layers."""
        for name, wanted in zip(("attn_q", "attn_k", "ffn_up"), rows, strict=True):
            entry = self.file.tensors.get(f"blk.0.{name}.weight")
            fine = ((wanted, hidden), (2 * wanted, hidden))[: 2 if name == "ffn_up" else 1]
            if entry is not None and entry.dims not in fine:  # an MLP's gate may be with it
                raise self._no_model(
                    f"tensor {entry.name} has the size {list(entry.dims)}, and the metadata asks "
                    f"for {[wanted, hidden]}"
                )

    def _tokens(self) -> dict[str, int | None]:
        names = {"bos": "bos", "eos": "eos", "pad": "padding"}
        found: dict[str, int | None] = {}
        for ours, theirs in names.items():
            key = f"tokenizer.ggml.{theirs}_token_id"
            given = self.file.metadata.get(key)
            found[f"{ours}_token_id"] = None if given is None else self._number(key, int, given)
        return found


_LAYER = re.compile(r"(?:enc\.)?blk\.(0|[1-9][0-9]{0,3})\.")
_SCALED = {"gemma2", "gemma3_text", "granite", "granitemoe"}
"""Models that are given the scale of their scores."""
