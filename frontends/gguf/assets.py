"""The files of a model that come with a GGUF file: its tokenizer's, and config.json.

They are written where they stay as long as this process, and kept on disk for the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from ...ir import GraftworkWarning, InputError, UnsupportedError
from ...ir.support.discovery import sources_of, versions_of
from ...ir.support.files import stamp_of
from ...ir.support.scratch import Scratch
from ...ir.text.kept_files import Kept, kept_file, read_kept, write_kept
from .vocabulary import Vocabulary

Stamp = tuple[int, ...]


def assets_of(path: Path, vocabulary: Vocabulary, texts: Mapping[str, str]) -> dict[str, Path]:
    """The files by name. texts: those of other files than the tokenizer's.

    Warns (`GraftworkWarning`) if there is no tokenizer for the vocabulary."""
    stamp = stamp_of(path.stat())
    return _files(_kept(path, stamp) or _made(path, stamp, vocabulary, texts))


def kept_assets(path: Path) -> dict[str, Path] | None:
    """The files, if they are kept; nothing is imported for them."""
    scratch = _kept(path, stamp_of(path.stat()))
    return None if scratch is None else _files(scratch)


def _files(scratch: Scratch) -> dict[str, Path]:
    return {file.name: file for file in sorted(scratch.path.iterdir())}


def _key(path: Path, stamp: Stamp) -> str:
    tools = versions_of("transformers", "tokenizers")
    known = (str(path.absolute()), stamp, sys.version_info[:3], tools, sources_of(_FOLDER))
    return hashlib.sha256(repr(known).encode()).hexdigest()


_FOLDER = Path(__file__).parent
_read: dict[tuple[Path, Stamp], Scratch] = {}
"""The files that this process has read or made."""


def _kept(path: Path, stamp: Stamp) -> Scratch | None:
    if (path, stamp) in _read:
        return _read[path, stamp]
    with kept_file("tokenizers", _key(path, stamp)) as file:
        kept = read_kept(file)
    if kept is None:
        return None
    scratch = Scratch()
    for name, data in kept.tensors.items():
        (scratch.path / Path(name).name).write_bytes(data.numpy().tobytes())
    _read[path, stamp] = scratch
    return scratch


def _made(path: Path, stamp: Stamp, vocabulary: Vocabulary, texts: Mapping[str, str]) -> Scratch:
    scratch, made = Scratch(), dict(texts)
    try:
        made |= vocabulary.files()
    except (InputError, UnsupportedError) as error:
        warnings.warn(f"{error}; pass token ids instead of text", GraftworkWarning, stacklevel=2)
    for name, text in made.items():
        (scratch.path / name).write_text(text, encoding="utf-8")
    if "tokenizer.json" not in made:
        return scratch
    _read[path, stamp] = scratch
    data = {
        name: torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())
        for name, text in made.items()
    }
    with (
        contextlib.suppress(OSError, InputError),  # a full disk costs time, not the model
        kept_file("tokenizers", _key(path, stamp)) as kept,
    ):
        write_kept(kept, Kept({}, data))
    return scratch
