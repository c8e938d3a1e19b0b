"""A GGUF file as a program: its metadata becomes a configuration, its blocks weights of few bits.

The model is traced as transformers has it (`architectures`, `config`), with the file's tensors as
its parameters (`tensors`).
"""

from __future__ import annotations

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...ir import (
    InputError,
    Program,
    UnsupportedError,
)
from ...ir.support.names import shown
from ...ir.support.packages import require
from ..generation import Known, nobody
from ..huggingface.model import import_tensors, tell
from .assets import assets_of
from .config import architecture_of, config_of
from .metadata import Metadata
from .reader import GgufFile
from .rows import floats_of, width_of
from .tensors import Reader
from .vocabulary import Vocabulary

FREQUENCIES = "rope_freqs.weight"
"""What the rotary embedding's frequencies are divided by (llama 3.1)."""


def import_gguf(path: Path, dtype: torch.dtype | None = None, known: Known = nobody) -> Program:
    """A GGUF file as a program, its tokenizer among the assets.

    dtype: of the floating weights; None is float32. known: see `import_model`. Errors: `InputError`
    for a damaged file or one whose tensors and metadata do not agree, `UnsupportedError` for
    architectures and tensors that are not read.
    """
    from transformers import AutoConfig, GenerationConfig

    require("gguf", "reading a .gguf file", "gguf")
    file = GgufFile.whole(path)
    reader = Metadata(file)
    architecture = architecture_of(reader)
    for part in {id(p): p for p in (file, *file.parts.values())}.values():
        _check_places(part)
    meta = config_of(reader)
    vocabulary = Vocabulary.of(file, meta["vocab_size"])
    named = {f"{role}_token_id": vocabulary.special[role] for role in ("bos", "eos", "pad")}
    try:
        config = AutoConfig.for_model(architecture.model_type, **meta, **named)
        generation = GenerationConfig.from_model_config(config)
    except Exception as error:  # transformers' own kinds, which are no ValueErrors
        raise UnsupportedError(
            f"{path}: transformers has no {architecture.model_type} model of its sizes: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    generation.update(**reader.sampling(), eos_token_id=list(vocabulary.last) or None)
    assets = assets_of(
        path,
        vocabulary,
        {
            "config.json": json.dumps(config.to_dict(), default=str),
            "generation_config.json": generation.to_json_string(),
        },
    )
    tell(known, config, generation, assets)
    return import_tensors(
        path,
        config,
        Reader(file, architecture, config).read,
        dtype or torch.float32,
        generation=generation,
        assets=assets,
        prepare=partial(_divide_frequencies, file),
    )


def _check_places(file: GgufFile) -> None:
    """That tensors lie in the file, begin where they may, and share no byte."""
    before, end = "", 0
    own = (entry for name, entry in file.tensors.items() if file.owner(name) is file)
    for entry in sorted(own, key=lambda entry: entry.start):
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
        before, end = entry.name, entry.start + prod(entry.dims[:-1]) * width_of(file, entry)
        if end > file.size:
            raise InputError(
                f"{file.path}: tensor {shown(entry.name)} ends {end - file.size} bytes after the "
                f"file; fetch it again"
            )


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
    factors = floats_of(file, entry).load()
    if not torch.isfinite(factors).all() or (factors <= 0).any():
        raise InputError(f"{file.path}: tensor {FREQUENCIES}: expected positive numbers")
    frequencies.div_(factors)
