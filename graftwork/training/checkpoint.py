"""Checkpoints of training: weights, optimizer state and progress, replaced atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..ir import InputError
from ..ir.support.files import read_json, writing
from ..ir.support.scratch import replacing_file

HEADS = "heads.safetensors"
STATE = "state.json"


@dataclass
class Progress:
    """State of training. seconds: spent in steps. losses: by step. target: see `trained_on`. files:
    sha256 by name. sha256: of the other fields."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    losses: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    target: str = ""
    files: dict[str, str] = field(default_factory=dict)
    sha256: str = ""

    def sealed(self) -> str:
        """JSON with the hash."""
        rest = {name: value for name, value in vars(self).items() if name != "sha256"}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        return json.dumps({**rest, "sha256": digest}, indent=1)


def write(
    folder: Path,
    progress: Progress,
    heads: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
) -> None:
    """Save a checkpoint. Files get new names, and state.json, written last, lists them: an
    interrupted save keeps the previous checkpoint."""
    mark = f"{progress.step:07d}"
    names = {HEADS: f"heads.{mark}.safetensors", "optimizer": f"optimizer.{mark}.safetensors"}
    _save(folder / names[HEADS], heads, progress.target)
    _save(folder / names["optimizer"], optimizer, progress.target)
    progress.files = {name: _digest(folder / name) for name in names.values()}
    _replace(folder / STATE, progress.sealed().encode())
    # Last: a copy under the name that recipes read, and removal of old files.
    _replace(folder / HEADS, (folder / names[HEADS]).read_bytes())
    for old in [*folder.glob("heads.*.safetensors"), *folder.glob("optimizer.*.safetensors")]:
        if old.name not in progress.files:
            with writing(old):
                old.unlink()


def read(folder: Path) -> tuple[Progress, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read a checkpoint: progress, weights, optimizer state. Errors: `InputError`."""
    remedy = "train again without resume, or restore the folder"
    try:
        stored = read_json(folder / STATE)
        progress = TypeAdapter(Progress).validate_json(json.dumps(stored))
        if json.loads(progress.sealed()) != stored:
            raise ValueError("its sha256 differs")
    except FileNotFoundError as error:
        raise InputError(f"nothing to resume: {folder} has no {STATE}") from error
    except (OSError, ValueError) as error:
        what = " ".join(str(error).split())[:300]
        raise InputError(f"{folder / STATE} is damaged ({what}); {remedy}") from error
    tensors: list[dict[str, torch.Tensor]] = []
    for name, digest in sorted(progress.files.items()):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{folder / STATE} names {name!r}, outside the folder; {remedy}")
        path = folder / name
        if not path.is_file() or _digest(path) != digest:
            raise InputError(f"{path} is missing or damaged; {remedy}")
        try:
            tensors.append(load_file(path))
        except SafetensorError as error:
            raise InputError(f"{path} is not safetensors ({error}); {remedy}") from error
    if len(tensors) != 2:
        raise InputError(f"{folder / STATE} names {len(tensors)} files, not 2; {remedy}")
    return progress, tensors[0], tensors[1]


def moments(
    optimizer: torch.optim.Optimizer, names: Sequence[str], parameters: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An optimizer's state of named parameters, for `write`."""
    return {
        f"{name}/{key}": value
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def restore(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
) -> None:
    """Restore named parameters from weights, and an optimizer's state from `moments`."""
    with torch.no_grad():
        for name, parameter in zip(names, parameters, strict=True):
            parameter.copy_(weights[name])
    places = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    place = {name: places.index(id(p)) for name, p in zip(names, parameters, strict=True)}
    state: dict[int, dict[str, torch.Tensor]] = {at: {} for at in place.values()}
    for path, value in kept.items():
        name, _, key = path.rpartition("/")
        state[place[name]][key] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _save(path: Path, tensors: Mapping[str, torch.Tensor], target: str) -> None:
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing_file(path) as part:
        save_file(copies, part, metadata={"format": "graftwork-heads-1", "target": target})


def _replace(path: Path, data: bytes) -> None:
    with replacing_file(path) as part:
        part.write_bytes(data)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
