"""Files of tensors that carry a sha256 of themselves: they are complete, or not there at all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch

from ..ir import InputError
from ..ir.support.scratch import replacing_file
from ..ir.weight_files import SafetensorsFile

_UNSEALED = "0" * 64
"""What stands in the header in the place of the file's own sha256 when that is made."""


def write_sealed(path: Path, tensors: dict[str, torch.Tensor], said: Mapping[str, str]) -> None:
    """Write a safetensors file with this metadata and its sha256.

    It is written beside the path first: a reader sees the old file or the new one. Errors:
    `InputError` for a folder that is not there or a file that cannot be written.
    """
    from safetensors.torch import save_file

    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    with replacing_file(path) as partial:
        save_file(tensors, partial, metadata={**said, "sha256": _UNSEALED})
        seal(partial)


def is_sealed(file: SafetensorsFile) -> bool:
    """Whether a file is as `write_sealed` left it."""
    said = file.metadata()
    return _digest(file, said.get("sha256", _UNSEALED)) == said.get("sha256")


def seal(path: Path) -> None:
    """Put the sha256 of a file into its header, in the place of what stands there."""
    file = SafetensorsFile(path)
    said = file.metadata()["sha256"]
    made = _digest(file, said).encode()
    with path.open("r+b") as written:
        head = _head(written)
        written.seek(0)
        written.write(head.replace(said.encode(), made, 1))


def _digest(file: SafetensorsFile, said: str) -> str:
    """sha256 of a file whose header says `said` in the place of it."""
    with file.raw() as raw:
        digest = hashlib.sha256(_head(raw).replace(said.encode(), _UNSEALED.encode(), 1))
        while piece := raw.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def _head(file: IO[bytes]) -> bytes:
    """The length of the header, and the header."""
    size = file.read(8)
    return size + file.read(int.from_bytes(size, "little"))
