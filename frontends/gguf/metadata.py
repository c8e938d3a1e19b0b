"""What a GGUF file's metadata says of its model, as a configuration of transformers.

Keys of an architecture (``llama.*``) say how its model computes, and llama.cpp knows many that the
models here have no place for. So every one is either read (`_READ`), or changes nothing at all
(`SILENT`), or changes nothing at the value that it has (`_NEUTRAL`), or is refused by name. What
they mean is what llama.cpp's loader makes of them (llama_model::load_hparams and the graphs of the
three architectures): a rope factor without a type is linear, one of zero is none, and counts may be
arrays with an entry for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any, TypeVar

from ...ir import InputError, UnsupportedError
from ...ir.support.names import shown
from .reader import GgufFile, Value

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Architecture:
    """An architecture that is read. model_type: transformers' name. interleaved: rows of queries
    and keys are in the order of pairs (2i, 2i+1), and of (i, i + half) in transformers. divided:
    a tensor may say what the rotary embedding's frequencies are divided by."""

    model_type: str
    interleaved: bool = False
    divided: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True, divided=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}

_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "embedding_length_out",
    "expert_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
}

SILENT = {
    "attention.layer_norm_epsilon",  # of norms that subtract the mean, of which there are none
    "attention.sliding_window_pattern",  # says which layers have the window
    "classifier.output_labels",
    "pooling_type",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",  # this and the betas: of YaRN, which is refused
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",  # the table of tokens says it
}

_NEUTRAL: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_used_count": (0,),
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
    "use_parallel_residual": (False,),
}


class Metadata:
    """The metadata that a configuration is made of."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))

    def architecture(self) -> Architecture:
        """Errors: `UnsupportedError` for another than those that are read."""
        if self.name not in ARCHITECTURES:
            raise UnsupportedError(
                f"{self.file.path}: general.architecture: expected one of "
                f"{', '.join(ARCHITECTURES)}, got {shown(self.name)}"
            )
        parts = self.file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise UnsupportedError(
                f"{self.file.path} is one of {shown(parts)} parts of a model (split.count): put "
                f"them together first (llama-gguf-split --merge)"
            )
        if self.number("expert_count", int, 0):
            raise UnsupportedError(f"{self.file.path}: mixtures of experts are not supported")
        self._refuse_others()
        return ARCHITECTURES[self.name]

    def _refuse_others(self) -> None:
        """Errors: `UnsupportedError` for a key that may change what the model computes."""
        for whole, value in self.file.metadata.items():
            key = whole.removeprefix(f"{self.name}.")
            neutral = _NEUTRAL.get(key, ())
            same = any(
                value == v and isinstance(value, bool) is isinstance(v, bool) for v in neutral
            )
            if key == whole or key in _READ or key in SILENT or same:
                continue
            fine = " or ".join(map(repr, neutral))
            raise UnsupportedError(
                f"{self.file.path}: {whole} is {shown(value)}, and {self.name} models are read "
                f"{f'with {fine}' if fine else 'without that'}: it may change what the model "
                f"computes. If it does not, take the key away (gguf-new-metadata "
                f"--remove-metadata {whole})"
            )

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """An entry of the architecture. Errors: `InputError` if it is missing or no number."""
        whole = f"{self.name}.{key}"
        return self._number(whole, kind, self.file.metadata.get(whole, default))

    def _number(self, whole: str, kind: type[T], found: Value | None) -> T:
        accepted = (int,) if kind is int else (int, float)
        if isinstance(found, bool) or not isinstance(found, accepted) or not 0 <= found < 2**40:
            raise InputError(
                f"{self.file.path}: {whole}: expected a number, got "
                f"{'nothing' if found is None else shown(found)}"
            )
        return kind(found)

    def count(self, key: str, default: int | None = None) -> int:
        """A number that is the same for all layers: one, or an array with an entry for each.

        Errors: `InputError` if it is neither, `UnsupportedError` if layers differ."""
        whole = f"{self.name}.{key}"
        found = self.file.metadata.get(whole)
        if not isinstance(found, tuple):
            return self.number(key, int, default)
        layers = self.number("block_count", int)
        if len(found) != layers or not found:
            raise InputError(
                f"{self.file.path}: {whole} has {len(found)} entries; expected one for each of "
                f"{layers} layers"
            )
        if len(set(found)) != 1:
            raise UnsupportedError(
                f"{self.file.path}: {whole} differs from layer to layer ({shown(found)}), and "
                f"{self.name} models are read with layers that are alike"
            )
        return self._number(whole, int, found[0])

    def config(self) -> dict[str, Any]:
        """What transformers is told. Errors: `InputError` for numbers that do not fit each other
        or the tensors, `UnsupportedError` for what has no place in such a model."""
        heads, hidden = self.count("attention.head_count"), self.number("embedding_length", int)
        groups = self.count("attention.head_count_kv", heads)
        if not heads or not hidden or not groups or heads % groups:
            raise self._no_model(f"{heads} heads over {groups} of {hidden} channels are no model")
        dim = self.number("attention.key_length", int, hidden // heads)
        if not dim or dim % 2:
            raise self._no_model(f"heads of {dim} channels have no rotary embedding")
        for other in ("rope.dimension_count", "attention.value_length"):
            self._expect(other, dim, "as keys have")
        self._expect("embedding_length_out", hidden, "as the embedding has")
        context = self.number("context_length", int)
        if not 0 < context < 2**31:
            raise self._no_model(f"{self.name}.context_length is {context}")
        self._check_attention(dim, context)
        inner = self.count("feed_forward_length")
        layers = self.number("block_count", int)
        self._check_tensors(layers, hidden, (heads * dim, groups * dim, inner))
        return {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": dim,
            "vocab_size": self.file.tensors["token_embd.weight"].dims[0],
            "max_position_embeddings": context,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", float),
            "rope_parameters": self._rotary(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": self.name == "llama" and "blk.0.attn_q.bias" in self.file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.file.tensors,
            "dtype": "float32",
            **self._tokens(),
        }

    def _no_model(self, what: str) -> InputError:
        return InputError(f"{self.file.path}: {what}; fetch the file again")

    def _expect(self, key: str, wanted: int, why: str) -> None:
        if (given := self.number(key, int, wanted)) != wanted:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.{key}={given}: expected {wanted}, {why}"
            )

    def _check_attention(self, dim: int, context: int) -> None:
        """Scores are scaled by the root of a head's channels, and every token is seen."""
        scale = self.number("attention.scale", float, 0.0)
        if scale and not isclose(scale, dim**-0.5, rel_tol=1e-5):
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.attention.scale={scale}: expected {dim**-0.5}"
            )
        window = self.count("attention.sliding_window", 0)
        if 0 < window < context:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.attention.sliding_window={window}: expected none, "
                f"or the whole context of {context} tokens"
            )

    def _check_tensors(self, layers: int, hidden: int, rows: tuple[int, int, int]) -> None:
        """That the file has as many layers as it says, of these sizes: before a model of that many
        is made. rows: of queries, of keys, and of the layer between two layers."""
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
        for name, wanted in zip(("attn_q", "attn_k", "ffn_up"), rows, strict=True):
            entry = self.file.tensors.get(f"blk.0.{name}.weight")
            if entry is not None and entry.dims != (wanted, hidden):
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

    def _rotary(self) -> dict[str, Any]:
        base = self.number("rope.freq_base", float, 10000.0)
        if not base:
            raise self._no_model(f"{self.name}.rope.freq_base is 0")
        kind = self.file.metadata.get(f"{self.name}.rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.rope.scaling.type: expected none or linear, got "
                f"{shown(kind)}"
            )
        old = self.number("rope.scale_linear", float, 0.0)  # what the factor was called once
        factor = self.number("rope.scaling.factor", float, old)
        if kind == "none" or factor in (0.0, 1.0):
            return {"rope_type": "default", "rope_theta": base}
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}


_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,3})\.")
