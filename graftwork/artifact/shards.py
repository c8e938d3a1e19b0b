"""Writing weights as safetensors, one tensor at a time, to bound memory.

A file is a header (8 bytes of its length, then JSON: dtype, shape and byte range by name) and the
tensors' bytes. The header needs types only; each tensor is then loaded, checked, written, hashed
and freed in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ir import InputError, Program, TensorType, Weight, WeightStore, derivation, derive
from ..ir.weight_files import SAFETENSORS_DTYPES

DTYPES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
SHARD_BYTES = 2**31


@dataclass(frozen=True)
class Written:
    """A written file: name in the folder, size in bytes, sha256 in hex."""

    name: str
    bytes: int
    sha256: str


@derivation
def finite(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """The tensor. Errors: `InputError` naming the weight if it holds a NaN (infinity is fine)."""
    if tensor.dtype.is_floating_point and bool(torch.isnan(tensor).any()):
        count = int(torch.isnan(tensor).sum())
        raise InputError(
            f"weight {name} {TensorType.of(tensor)} holds {count} NaN values of {tensor.numel()}: "
            f"the checkpoint is broken, or a pass overflowed its dtype"
        )
    return tensor


def checked(program: Program) -> Program:
    """The program with weights that `finite` checks when they are loaded."""
    weights = {
        name: derive(name, weight.type, finite, weight, name=name)
        for name, weight in program.weights.items()
    }
    return program.replace(weights=WeightStore(weights))


def plan_shards(weights: Sequence[Weight], limit: int = SHARD_BYTES) -> list[list[Weight]]:
    """Weights in order, split into files of at most `limit` bytes (a larger one stands alone)."""
    shards: list[list[Weight]] = []
    room = 0
    for weight in weights:
        if not shards or weight.type.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(weight)
        room -= weight.type.nbytes
    return shards


def write_weights(
    folder: Path,
    weights: Sequence[Weight],
    limit: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda name: None,
    stem: str = "weights",
) -> list[Written]:
    """Write weights as ``weights.safetensors`` or ``weights-00001-of-0000N.safetensors`` (stem:
    another name), split by `plan_shards`, with one tensor in memory at a time. Errors: `InputError`
    naming a weight with NaN values."""
    shards = plan_shards(weights, limit)
    count = len(shards)
    names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    written = []
    for name, shard in zip(names, shards, strict=True):
        written.append(_write_shard(folder / name, shard, progress))
    return written


def _write_shard(path: Path, weights: Sequence[Weight], progress: Callable[[str], None]) -> Written:
    ordered = sorted(weights, key=_place)
    header = _header(ordered)
    digest = hashlib.sha256(header)
    size = len(header)
    with path.open("xb") as file:
        file.write(header)
        for weight in ordered:
            progress(weight.name)
            tensor = finite(weight.load(), name=weight.name)
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            data = memoryview(flat)
            file.write(data)
            digest.update(data)
            size += len(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


def _place(weight: Weight) -> int:
    """Sort key by which every tensor starts at a multiple of its element size, and weights that are
    computed together mostly stay together: behind those of whole words, wide dtypes come first."""
    return 0 if weight.type.nbytes % 8 == 0 else 9 - weight.type.dtype.itemsize


def _header(weights: Sequence[Weight]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight in weights:
        end = offset + weight.type.nbytes
        entries[weight.name] = {
            "dtype": DTYPES[weight.type.dtype],
            "shape": list(weight.type.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
