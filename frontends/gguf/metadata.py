"""Reading a GGUF file's metadata, and holding it against the file's tensors."""

from __future__ import annotations

import re
import warnings
from math import isfinite
from typing import Any, TypeVar

import torch

from ...ir import GraftworkWarning, InputError, UnsupportedError
from ...ir.support.names import shown
from .reader import Entry, GgufFile, Value

T = TypeVar("T", int, float)


class Metadata:
    """The metadata that a configuration is made of, and what of it was read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))
        self.read = {"expert_count"}

    def get(self, key: str, default: Value | None = None) -> Value | None:
        """An entry of the architecture, which counts as read."""
        self.read.add(key)
        return self.file.metadata.get(f"{self.name}.{key}", default)

    @property
    def layers(self) -> int:
        """Layers that logits are made by. Behind them may be some that predict later tokens."""
        return self.number("block_count", int) - self.number("nextn_predict_layers", int, 0)

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
            raise self.no_model(f"tensor {tensor}: expected f32 of one axis")
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
            return (self.number(key, int, default),) * min(self.layers, len(self.file.tensors) + 1)
        if len(found) != layers or not found:
            raise InputError(
                f"{self.file.path}: {whole} has {len(found)} entries; expected one for each of "
                f"{layers} layers"
            )
        return tuple(self._number(whole, int, value) for value in found[: self.layers])

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

    def rotary(self, *, scaled: bool = True) -> dict[str, Any]:
        """The rotary embedding's base and, if `scaled`, how its frequencies are scaled."""
        base = self.number("rope.freq_base", float, 10000.0)
        if not base:
            raise self.no_model(f"{self.name}.rope.freq_base is 0")
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
        """What scores are multiplied by if nothing else is meta."""
        heads, hidden = self.count("attention.head_count"), self.number("embedding_length", int)
        return float(self.number("attention.key_length", int, hidden // heads) ** -0.5)

    def unlike(self, key: str, given: Any, wanted: Any) -> UnsupportedError:
        """The error for an entry that has no place in the model."""
        return UnsupportedError(f"{self.file.path}: {self.name}.{key}={given}: expected {wanted}")

    def no_model(self, what: str) -> InputError:
        return InputError(f"{self.file.path}: {what}; fetch the file again")

    def expect(self, key: str, wanted: int, why: str) -> None:
        if (given := self.number(key, int, wanted)) != wanted:
            raise UnsupportedError(
                f"{self.file.path}: {self.name}.{key}={given}: expected {wanted}, {why}"
            )

    def check_layers(self, layers: int, hidden: int) -> None:
        """That the file has as many layers as it says, and a table of as many channels: before a
        model of that many is made."""
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.dims) != 2:
            raise self.no_model("it holds no table token_embd.weight of two axes")
        if table.dims[1] != hidden:
            raise self.no_model(
                f"tensor token_embd.weight has rows of {table.dims[1]} channels, and "
                f"{self.name}.embedding_length is {hidden}"
            )
        there = {int(m[1]) for m in map(_LAYER.match, self.file.tensors) if m}
        count = self.number("block_count", int)
        if layers < 1 or len(there) != count or there != set(range(count)):
            raise self.no_model(
                f"{self.name}.block_count is {count}, and the file has tensors of {len(there)} "
                f"layers{f', the last of them {max(there)}' if there else ''}"
            )
        for layer in range(layers, count):
            if not self.has(name := f"blk.{layer}.nextn.eh_proj.weight"):
                raise self.no_model(f"{self.name}.nextn_predict_layers asks for a tensor {name}")

    def check_rows(self, hidden: int, rows: tuple[int, int, int]) -> None:
        """That the first layer has the sizes of the metadata. rows: of queries, of keys, and of the
        layer between two layers."""
        for name, wanted in zip(("attn_q", "attn_k", "ffn_up"), rows, strict=True):
            entry = self.file.tensors.get(f"blk.0.{name}.weight")
            fine = ((wanted, hidden), (2 * wanted, hidden))[: 1 if name == "attn_k" else 2]
            if entry is not None and entry.dims not in fine:  # a gate may be with it
                raise self.no_model(
                    f"tensor {entry.name} has the size {list(entry.dims)}, and the metadata asks "
                    f"for {[wanted, hidden]}"
                )

    def sampling(self) -> dict[str, Any]:
        """How the file says that texts are sampled, by transformers' names.

        Warns (`GraftworkWarning`) of what has no such name. Errors: `InputError` for no numbers.
        """
        start, found, others = "general.sampling.", {}, []
        for whole, given in self.file.metadata.items():
            key = whole.removeprefix(start)
            if key in _SAMPLING:
                name, kind = _SAMPLING[key]
                found[name] = self._number(whole, kind, given)
            elif key != whole and given != _UNSAMPLED.get(key):
                others.append(f"{whole}={shown(given)}")
        if others:
            warnings.warn(
                f"{self.file.path}: {', '.join(others)}: texts are sampled without that",
                GraftworkWarning,
                stacklevel=2,
            )
        if "temperature" in found:
            found["do_sample"] = found["temperature"] > 0
        if found.get("do_sample") is False:
            del found["temperature"]
        return found


_SAMPLING: dict[str, tuple[str, type]] = {
    "temp": ("temperature", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "penalty_repeat": ("repetition_penalty", float),
}
_UNSAMPLED = {"xtc_probability": 0.0, "mirostat": 0, "penalty_last_n": -1}
"""What is not supported, and the values at which it asks for nothing."""

_LAYER = re.compile(r"(?:enc\.)?blk\.(0|[1-9][0-9]{0,3})\.")
