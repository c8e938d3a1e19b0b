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
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...ir import (
    GraftworkWarning,
    InputError,
    Program,
    TensorType,
    UnsupportedError,
    Weight,
    derivation,
    derive,
)
from ...ir.ops.numerics import pack
from ...ir.support.names import shown
from ...ir.support.packages import installing
from ...ir.support.scratch import Scratch
from ...ir.support.tokenizer import refusing
from ..generation import Known, nobody
from ..huggingface.checkpoint import Tensors
from ..huggingface.model import import_tensors, tell
from ..stored_weights import StoredWeight
from .blocks import FLOATS, TYPES, BlockType
from .metadata import Architecture, Metadata
from .reader import Entry, GgufFile

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


def import_gguf(path: Path, dtype: torch.dtype | None = None, known: Known = nobody) -> Program:
    """A GGUF file as a program, its tokenizer among the assets.

    dtype: of the floating weights; None is float32. known: see `import_model`. Errors: `InputError`
    for a damaged file or one whose tensors and metadata do not agree, `UnsupportedError` for
    architectures and tensors that are not read.
    """
    from transformers import AutoConfig, GenerationConfig

    _require_gguf()
    file = GgufFile.open(path)
    reader = Metadata(file)
    architecture = reader.architecture()
    _check_places(file)
    said = reader.config()
    try:
        config = AutoConfig.for_model(architecture.model_type, **said)
        generation = GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers' own kinds, which are no ValueErrors
        raise UnsupportedError(
            f"{path}: transformers has no {architecture.model_type} model of its sizes: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    tensors, kept = _tensors(file, architecture, config)
    assets = _assets(path, json.dumps(config.to_dict(), default=str))
    tell(known, config, generation, assets)
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


def _tensors(
    file: GgufFile, known: Architecture, config: Any
) -> tuple[Tensors, dict[str, StoredWeight]]:
    """The file's tensors by transformers' names, and those that are kept in few bits."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: Tensors = {}
    kept: dict[str, StoredWeight] = {}
    others: list[str] = []
    for entry in file.tensors.values():
        if entry.name == FREQUENCIES and known.divided:
            continue
        name = _renamed(file, entry.name)
        count = heads.get(name.split(".")[-2]) if known.interleaved else None
        if count is not None:
            _check_halves(file, entry, count)
        weight = _weight(file, entry, name, count, others)
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
    layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,3})\.(\w+)", owner)
    if owner in _WHOLE and part in ("weight", "bias"):
        return f"{_WHOLE[owner]}.{part}"
    if layer and layer[2] in _OF_LAYERS and part in ("weight", "bias"):
        return f"model.layers.{int(layer[1])}.{_OF_LAYERS[layer[2]]}.{part}"
    raise UnsupportedError(
        f"{file.path}: tensor {shown(name)} is none that the architecture's layers have here"
    )


def _check_halves(file: GgufFile, entry: Entry, heads: int) -> None:
    """Errors: `InputError` for rows that are no pairs in each head."""
    rows = entry.dims[0]
    if heads < 1 or rows % (2 * heads):
        raise InputError(
            f"{file.path}: tensor {entry.name} has {rows} rows, which are no pairs in {heads} heads"
        )


def _weight(
    file: GgufFile, entry: Entry, name: str, heads: int | None, others: list[str]
) -> StoredWeight | Weight:
    """A tensor as a weight. heads: see `block_rows`. others: gets those of unknown types."""
    if entry.kind in FLOATS:
        return _floats(file, entry, name, heads)
    kind = TYPES.get(entry.kind)
    if kind is None:
        others.append(f"{entry.name} (type {entry.kind})")
        return _dequantized(file, entry, name, heads)
    if len(entry.dims) != 2:
        raise InputError(
            f"{file.path}: tensor {entry.name} has the size {list(entry.dims)}; blocks are in rows"
        )
    return _stored(file, entry, kind, _rows(file, entry, heads))


def _check_places(file: GgufFile) -> None:
    """That tensors lie in the file, begin where they may, and share no byte."""
    before, end = "", 0
    for entry in sorted(file.tensors.values(), key=lambda entry: entry.start):
        if entry.start % file.alignment:
            raise InputError(
                f"{file.path}: tensor {shown(entry.name)} begins at byte {entry.start}, which is "
                f"no multiple of {file.alignment} (general.alignment); fetch it again"
            )
        if entry.start < end:
            raise InputError(
                f"{file.path}: tensor {shown(entry.name)} begins at byte {entry.start}, within "
                f"{shown(before)}; fetch it again"
            )
        before, end = entry.name, entry.start + prod(entry.dims[:-1]) * _width(file, entry)
        if end > file.size:
            raise InputError(
                f"{file.path}: tensor {shown(entry.name)} ends {end - file.size} bytes after the "
                f"file; fetch it again"
            )


def _width(file: GgufFile, entry: Entry) -> int:
    """Bytes of a row of a tensor. Errors: `InputError` for parts of blocks, `UnsupportedError` for
    types that not even the package knows."""
    columns = entry.dims[-1]
    if entry.kind in FLOATS:
        return columns * FLOATS[entry.kind].itemsize
    values, size = _block(file, entry)
    if columns % values:
        raise InputError(
            f"{file.path}: tensor {shown(entry.name)} has the size {list(entry.dims)}; its type "
            f"{entry.kind} has rows of blocks of {values} values"
        )
    return columns // values * size


def _block(file: GgufFile, entry: Entry) -> tuple[int, int]:
    """Values and bytes of a block of a tensor's type."""
    if (kind := TYPES.get(entry.kind)) is not None:
        return kind.values, kind.size
    import gguf

    try:
        values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(entry.kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedError(
            f"{file.path}: tensor {shown(entry.name)} has the block type {entry.kind}, which the "
            f"package gguf does not know"
        ) from error
    return int(values), int(size)


def _rows(file: GgufFile, entry: Entry, heads: int | None) -> Weight:
    """The bytes of a tensor's rows u8[R,W]; a vector's rows are its values."""
    held = entry
    if len(entry.dims) == 1 and entry.kind in FLOATS:
        held = Entry(entry.name, (*entry.dims, 1), entry.kind, entry.start)
    width = _width(file, held)
    type = TensorType(torch.uint8, (prod(held.dims[:-1]), width))
    options: dict[str, Any] = {"file": file, "entry": held, "width": width, "heads": heads}
    return derive(entry.name, type, block_rows, **options)


@derivation
def block_rows(*, file: GgufFile, entry: Entry, width: int, heads: int | None) -> torch.Tensor:
    """The bytes u8[R,width] of a tensor's rows. heads: each one's rows are pairs of which the first
    ones go before the second ones; None: rows stay in order."""
    rows = file.rows(entry, width)
    if heads is None:
        return rows
    return rows.reshape(heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)


def _floats(file: GgufFile, entry: Entry, name: str, heads: int | None) -> Weight:
    dtype, raw = FLOATS[entry.kind], _rows(file, entry, heads)
    type = TensorType(dtype, entry.dims)
    return derive(name, type, bytes_as, raw, dtype=dtype, dims=entry.dims)


@derivation
def bytes_as(rows: torch.Tensor, *, dtype: torch.dtype, dims: tuple[int, ...]) -> torch.Tensor:
    """Bytes u8[R,W] as the numbers that they are."""
    return rows.view(dtype).reshape(dims)


def _stored(file: GgufFile, entry: Entry, kind: BlockType, raw: Weight) -> StoredWeight:
    """A tensor of blocks, decoded part by part when they are loaded."""
    rows = int(str(raw.type.dims[0]))
    numeric = kind.numeric
    packed, scale = numeric.types(rows, entry.dims[-1])
    options: dict[str, Any] = {"kind": entry.kind, "rows": rows}
    scales = derive(f"{raw.name}.scale", scale, block_part, raw, part="scales", **options)
    offsets = None
    if kind.offsets is not None:
        offsets = derive(f"{raw.name}.offset", scale, block_part, raw, part="offsets", **options)
    for part in filter(None, (scales, offsets)):
        if not torch.isfinite(part.load().float()).all():
            raise InputError(f"{file.path}: tensor {raw.name} has scales that are not finite")
    book = torch.tensor(kind.codebook, dtype=torch.float32) if kind.codebook else None
    return StoredWeight(
        numeric,
        derive(f"{raw.name}.bits", packed, block_part, raw, part="codes", **options),
        scales,
        offsets,
        None if book is None else Weight.of(f"{kind.name}.codebook", book),
    )


@derivation
def block_part(blocks: torch.Tensor, *, kind: int, rows: int, part: str) -> torch.Tensor:
    """The scales, offsets or codes of rows of blocks u8[R,W] of a type; codes are packed."""
    type = TYPES[kind]
    found: torch.Tensor = getattr(type, part)(blocks.reshape(-1, type.size)).reshape(rows, -1)
    return pack(found, type.bits) if part == "codes" else found


def _dequantized(file: GgufFile, entry: Entry, name: str, heads: int | None) -> Weight:
    """A tensor of another type as floats, which the package makes."""
    raw, type = _rows(file, entry, heads), TensorType(torch.float32, entry.dims)
    return derive(name, type, dequantized_blocks, raw, kind=entry.kind, dims=entry.dims)


@derivation
def dequantized_blocks(rows: torch.Tensor, *, kind: int, dims: tuple[int, ...]) -> torch.Tensor:
    """What rows of blocks u8[R,W] stand for, by the package."""
    import gguf

    values = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).reshape(dims)


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
    from transformers import PreTrainedTokenizerFast

    scratch = Scratch()
    (scratch.path / "config.json").write_text(config + "\n", encoding="utf-8")
    try:
        with refusing(f"{path}: transformers makes no tokenizer of it"):
            # Of this file alone: `from_pretrained` also reads what lies beside it, and asks the
            # package for the architecture's configuration, which takes it seconds.
            made = PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent))
            made.save_pretrained(scratch.path)
    except InputError as error:
        warnings.warn(f"{error}; pass token ids instead of text", GraftworkWarning, stacklevel=2)
    return scratch


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise InputError(
            f"reading a .gguf file needs the package gguf, which is not installed: "
            f"{installing('gguf')}"
        ) from error
