"""Cache files on disk: texts and tensors in one safetensors file a key (traces, programs).

Files hold no code. Reading checks a hash over the contents; a damaged file counts as missing. The
size of a folder is bounded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..support.cache_folder import kept_folder
from ..support.errors import InputError
from ..support.scratch import replacing_file
from ..weight_files import open_safetensors

MOST = 256 * 2**20
"""Bytes of a folder at most; the least recently used files are removed."""


@dataclass(frozen=True)
class Kept:
    """Contents of a file: texts and tensors, by name."""

    texts: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]


@contextmanager
def kept_file(what: str, key: str) -> Iterator[Path]:
    """The path of a key's file, which need not exist. what: kind of the files ("traces")."""
    with kept_folder(what) as folder:
        yield folder / what / f"{key}.safetensors"


def read_kept(path: Path) -> Kept | None:
    """The contents of a file; None if it is missing or damaged."""
    try:
        os.utime(path)
        file = open_safetensors(path)
        texts = file.metadata()
        kept = Kept(texts, {name: file.tensor(name) for name in file.keys()})  # noqa: SIM118
        return kept if texts.pop("sha256", "") == _hash(kept) else None
    except (InputError, OSError):
        return None


def write_kept(path: Path, kept: Kept) -> None:
    """Write a file atomically and bound the folder. Errors: `OSError`."""
    from safetensors.torch import save_file

    path.parent.mkdir(mode=0o700, exist_ok=True)
    with replacing_file(path) as part:
        tensors = {name: tensor.contiguous().clone() for name, tensor in kept.tensors.items()}
        save_file(tensors, part, {**kept.texts, "sha256": _hash(kept)})
    make_room(path.parent)


def _hash(kept: Kept) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(kept.texts.items()):
        digest.update(f"{name} {len(text)} {text}".encode())
    for name, tensor in sorted(kept.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def make_room(folder: Path) -> None:
    """Remove the least recently used files of a folder beyond `MOST` bytes."""
    found = sorted(
        ((path.stat().st_mtime, path) for path in folder.iterdir() if path.is_file()), reverse=True
    )
    total = 0
    for _, path in found:
        total += path.stat().st_size
        if total > MOST:
            path.unlink(missing_ok=True)
