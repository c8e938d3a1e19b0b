"""A GGUF file as a program: its metadata becomes a configuration, its blocks weights of few bits.

The model is traced as transformers has it; tensors get transformers' names, and the rows of llama's
queries and keys, which the format keeps in the order of another rotary embedding, go back to
theirs. Blocks become `StoredWeight`s without a float detour; types that are none of `blocks.TYPES`
are dequantized by the `gguf` package, with a warning.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...ir import (
    GraftworkWarning,
    InputError,
    Program,
    TensorType,
    UnsupportedError,
    Weight,
    derive,
)
from ...ir.numerics import pack
from ...ir.scratch import Scratch
from ..huggingface.checkpoint import Tensors
from ..huggingface.model import import_tensors
from ..stored_weights import StoredWeight
from .blocks import FLOATS, TYPES, BlockType
from .reader import Entry, GgufFile, Value

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Architecture:
    """An architecture that is read. model_type: transformers' name. interleaved: rows of queries
    and keys are in the order of pairs (2i, 2i+1), and of (i, i + half) in transformers."""

    model_type: str
    interleaved: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"
"""What the rotary embedding's frequencies are divided by (llama 3.1)."""

_MOST_LAYERS = 10_000


def import_gguf(path: Path, dtype: torch.dtype | None = None) -> Program:
    """A GGUF file as a program, its tokenizer among the assets.

    dtype: of the floating weights; None is float32. Errors: `InputError` for a damaged file or one
    whose tensors and metadata do not agree, `UnsupportedError` for architectures and tensors that
    are not read.
    """
    from transformers import AutoConfig, GenerationConfig

    _require_gguf()
    file = GgufFile.open(path)
    reader = _Metadata(file)
    known = reader.architecture()
    config = AutoConfig.for_model(known.model_type, **reader.config())
    tensors, kept = _tensors(file, known, config)
    generation = GenerationConfig.from_model_config(config)
    assets = _assets(path, json.dumps(config.to_dict(), default=str))
    return import_tensors(
        path,
        config,
        tensors,
        kept,
        dtype or torch.float32,
        generation=generation,
        assets=assets,
        prepare=partial(_prepare, file, tensors),
    )


class _Metadata:
    """The metadata that a configuration is made of."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.name = str(file.metadata.get("general.architecture", ""))

    def architecture(self) -> Architecture:
        """Errors: `UnsupportedError` for another than those that are read."""
        if self.name not in ARCHITECTURES:
            raise UnsupportedError(
                f"{self.file.path}: general.architecture: expected one of "
                f"{', '.join(ARCHITECTURES)}, got {self.name!r}"
            )
        if self.number("expert_count", int, 0):
            raise UnsupportedError(f"{self.file.path}: mixtures of experts are not supported")
        return ARCHITECTURES[self.name]

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """An entry of the architecture. Errors: `InputError` if it is missing or no number."""
        key = f"{self.name}.{key}"
        found: Value | None = self.file.metadata.get(key, default)
        accepted = (int,) if kind is int else (int, float)
        if isinstance(found, bool) or not isinstance(found, accepted) or not 0 <= found < 2**40:
            raise InputError(f"{self.file.path}: {key}: expected a number, got {found!r}")
        return kind(found)

    def config(self) -> dict[str, Any]:
        """What transformers is told. Errors: `InputError` for numbers that do not fit."""
        heads = self.number("attention.head_count", int)
        hidden = self.number("embedding_length", int)
        if not heads or not hidden or self.number("block_count", int) > _MOST_LAYERS:
            raise InputError(f"{self.file.path}: {heads} heads of {hidden} channels are no model")
        dim = self.number("attention.key_length", int, hidden // heads)
        for other in ("rope.dimension_count", "attention.value_length"):
            if (given := self.number(other, int, dim)) != dim:
                raise UnsupportedError(
                    f"{self.file.path}: {self.name}.{other}={given}: expected {dim}, as keys have"
                )
        tokens = {
            "bos_token_id": self.file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.file.metadata.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.file.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        return {
            "hidden_size": hidden,
            "intermediate_size": self.number("feed_forward_length", int),
            "num_hidden_layers": self.number("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self.number("attention.head_count_kv", int, heads),
            "head_dim": dim,
            "vocab_size": self._vocabulary(),
            "max_position_embeddings": self.number("context_length", int),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon", float),
            "rope_parameters": self._rotary(),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": self.name == "llama" and "blk.0.attn_q.bias" in self.file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in self.file.tensors,
            "dtype": "float32",
            **tokens,
        }

    def _vocabulary(self) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.dims) != 2:
            raise InputError(f"{self.file.path} holds no table token_embd.weight of two axes")
        return table.dims[0]

    def _rotary(self) -> dict[str, Any]:
        base = self.number("rope.freq_base", float, 10000.0)
        kind = self.file.metadata.get(f"{self.name}.rope.scaling.type", "none")
        if kind == "none":
            return {"rope_type": "default", "rope_theta": base}
        if kind == "linear":
            factor = self.number("rope.scaling.factor", float)
            return {"rope_type": "linear", "rope_theta": base, "factor": factor}
        raise UnsupportedError(
            f"{self.file.path}: {self.name}.rope.scaling.type: expected none or linear, got "
            f"{kind!r}"
        )


def _tensors(
    file: GgufFile, known: Architecture, config: Any
) -> tuple[Tensors, dict[str, StoredWeight]]:
    """The file's tensors by transformers' names, and those that are kept in few bits."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: Tensors = {}
    kept: dict[str, StoredWeight] = {}
    others: list[str] = []
    for entry in file.tensors.values():
        if entry.name == FREQUENCIES:
            continue
        name = _renamed(file, entry.name)
        count = heads.get(name.split(".")[-2]) if known.interleaved else None
        order = None if count is None else _halves_first(file, entry, count)
        weight = _weight(file, entry, name, order, others)
        if isinstance(weight, StoredWeight):
            kept[name] = weight
            weight = weight.values(name)
        tensors[name] = _being(weight)
    if others:
        warnings.warn(
            f"{file.path}: {len(others)} tensors of other block types than "
            f"{', '.join(kind.name for kind in TYPES.values())} are dequantized: {others[0]}",
            GraftworkWarning,
            stacklevel=2,
        )
    return tensors, kept


def _being(weight: Weight) -> Callable[[], Weight]:
    return lambda: weight


def _renamed(file: GgufFile, name: str) -> str:
    """transformers' name of a tensor. Errors: `UnsupportedError` for one that it does not have."""
    owner, _, part = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d{1,4})\.(\w+)", owner)
    if owner in _WHOLE and part in ("weight", "bias"):
        return f"{_WHOLE[owner]}.{part}"
    if layer and layer[2] in _OF_LAYERS and part in ("weight", "bias"):
        return f"model.layers.{int(layer[1])}.{_OF_LAYERS[layer[2]]}.{part}"
    raise UnsupportedError(
        f"{file.path}: tensor {name} is none that the architecture's layers have here"
    )


def _halves_first(file: GgufFile, entry: Entry, heads: int) -> torch.Tensor:
    """Where each row of a head's halves stands among its pairs, i64[N]."""
    rows = entry.dims[0]
    if heads < 1 or rows % (2 * heads):
        raise InputError(
            f"{file.path}: tensor {entry.name} has {rows} rows, which are no pairs in {heads} heads"
        )
    return torch.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


def _weight(
    file: GgufFile, entry: Entry, name: str, order: torch.Tensor | None, others: list[str]
) -> StoredWeight | Weight:
    """A tensor as a weight, its rows in this order. others: gets those of unknown types."""
    if entry.kind in FLOATS:
        return _floats(file, entry, name, order)
    kind = TYPES.get(entry.kind)
    if kind is None:
        others.append(f"{entry.name} (type {entry.kind})")
        return _dequantized(file, entry, name, order)
    columns = entry.dims[-1]
    if len(entry.dims) != 2 or columns % kind.values:
        raise InputError(
            f"{file.path}: tensor {entry.name} has the size {list(entry.dims)}; {kind.name} has "
            f"rows of blocks of {kind.values} values"
        )
    raw = _rows(file, entry, columns // kind.values * kind.size, order)
    return _stored(file, kind, raw, columns)


def _rows(file: GgufFile, entry: Entry, width: int, order: torch.Tensor | None) -> Weight:
    """The bytes of a tensor's rows u8[R,width], in this order."""
    count = 1
    for dim in entry.dims[:-1]:
        count *= dim
    if entry.start + count * width > file.size:
        file.rows(entry, width)  # says so

    def read() -> torch.Tensor:
        rows = file.rows(entry, width)
        return rows if order is None else rows[order]

    return Weight(entry.name, TensorType(torch.uint8, (count, width)), read)


def _floats(file: GgufFile, entry: Entry, name: str, order: torch.Tensor | None) -> Weight:
    dtype = FLOATS[entry.kind]
    vector = len(entry.dims) == 1
    # A vector's rows are its values.
    held = Entry(entry.name, (*entry.dims, 1), entry.kind, entry.start) if vector else entry
    raw = _rows(file, held, held.dims[-1] * dtype.itemsize, order)
    type = TensorType(dtype, entry.dims)
    return derive(name, type, lambda rows: rows.view(dtype).reshape(entry.dims), raw)


def _stored(file: GgufFile, kind: BlockType, raw: Weight, columns: int) -> StoredWeight:
    """A tensor of blocks, decoded part by part when they are loaded."""
    rows = int(str(raw.type.dims[0]))
    numeric = kind.numeric
    packed, scale = numeric.types(rows, columns)

    def of(part: Callable[[torch.Tensor], torch.Tensor], blocks: torch.Tensor) -> torch.Tensor:
        return part(blocks.reshape(-1, kind.size)).reshape(rows, -1)

    def bits(blocks: torch.Tensor) -> torch.Tensor:
        return pack(of(kind.codes, blocks), kind.bits)

    scales = derive(f"{raw.name}.scale", scale, partial(of, kind.scales), raw)
    offsets = None
    if kind.offsets is not None:
        offsets = derive(f"{raw.name}.offset", scale, partial(of, kind.offsets), raw)
    for part in filter(None, (scales, offsets)):
        if not torch.isfinite(part.load().float()).all():
            raise InputError(f"{file.path}: tensor {raw.name} has scales that are not finite")
    book = torch.tensor(kind.codebook, dtype=torch.float32) if kind.codebook else None
    return StoredWeight(
        numeric,
        derive(f"{raw.name}.bits", packed, bits, raw),
        scales,
        offsets,
        None if book is None else Weight.of(f"{kind.name}.codebook", book),
    )


def _dequantized(file: GgufFile, entry: Entry, name: str, order: torch.Tensor | None) -> Weight:
    """A tensor of another type as floats. Errors: `UnsupportedError` if the package has it not."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(entry.kind)
        values, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{file.path}: tensor {entry.name} has the block type {entry.kind}, which the package "
            f"gguf does not know"
        ) from error
    if entry.dims[-1] % values:
        raise InputError(f"{file.path}: tensor {entry.name} has rows of parts of blocks")
    raw = _rows(file, entry, entry.dims[-1] // values * size, order)

    def make(rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(rows.numpy(), kind)).reshape(entry.dims)

    return derive(name, TensorType(torch.float32, entry.dims), make, raw)


def _prepare(file: GgufFile, tensors: Tensors, twin: Any) -> None:
    """Check that the model has every tensor, and divide its rotary frequencies as the file says."""
    known = set(dict(twin.named_parameters(remove_duplicate=False)))
    if strange := sorted(tensors.keys() - known):
        raise UnsupportedError(
            f"{file.path}: {len(strange)} tensors are none that a {type(twin).__name__} has: "
            f"{strange[0]}"
        )
    _divide_frequencies(file, twin)


def _divide_frequencies(file: GgufFile, twin: Any) -> None:
    entry = file.tensors.get(FREQUENCIES)
    if entry is None:
        return
    frequencies = twin.model.rotary_emb.inv_freq
    if entry.kind != 0 or entry.dims != tuple(frequencies.shape):
        raise InputError(
            f"{file.path}: tensor {FREQUENCIES}: expected f32{list(frequencies.shape)}, got the "
            f"size {list(entry.dims)} of type {entry.kind}"
        )
    factors = _floats(file, entry, entry.name, None).load()
    if not torch.isfinite(factors).all() or (factors <= 0).any():
        raise InputError(f"{file.path}: tensor {FREQUENCIES}: expected positive numbers")
    frequencies.div_(factors)


def _assets(path: Path, config: str) -> dict[str, Path]:
    """config.json and the tokenizer's files, written where they stay as long as this process."""
    stat = path.stat()
    stamp = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    folder = _written(path, stamp, config).path
    return {file.name: file for file in sorted(folder.iterdir())}


@lru_cache(maxsize=64)
def _written(path: Path, stamp: tuple[int, ...], config: str) -> Scratch:
    from transformers import AutoTokenizer

    scratch = Scratch()
    (scratch.path / "config.json").write_text(config + "\n", encoding="utf-8")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        tokenizer.save_pretrained(scratch.path)
    except Exception as error:  # transformers raises whatever converting a vocabulary does
        said = " ".join(str(error).split())[:200]
        warnings.warn(
            f"{path}: transformers makes no tokenizer of it ({type(error).__name__}: {said}); pass "
            f"token ids instead of text",
            GraftworkWarning,
            stacklevel=2,
        )
    return scratch


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise InputError(
            "reading a .gguf file needs the package gguf, which is not installed: pip install "
            "'graftwork[gguf]'"
        ) from error
