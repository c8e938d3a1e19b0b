"""Frontends: models as programs. One importer, `import_model`, for all sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..ir import InputError, Program
from ..ir.support.files import plain_path
from ..ir.support.packages import require
from ..ir.support.threads import traces
from .generation import Known, nobody

# Late imports: a source loads the packages of its own format alone.

__all__ = ["import_masked", "import_model", "import_part", "import_scoring", "kept_assets"]


@traces
def import_model(source: Any, dtype: torch.dtype | None = None, known: Known = nobody) -> Program:
    """A model as a program at stage "traced".

    source: a transformers causal language model, the folder of a checkpoint (config.json and
    safetensors), a .gguf file, a .onnx file or a folder with one (see `frontends.onnx`), or an
    `nn.Module` that maps token ids i64[B,T] to logits [B,T,V]. dtype: of the floating weights; None
    keeps the source's. Weights stay where they are until they are used. known: told what the files
    of a model say of it, and which of them come with it, before it is traced, which takes a while.

    Errors: `InputError` for files that are missing or wrong, `UnsupportedError` naming the module
    and op of what cannot be imported.
    """
    if isinstance(source, (str, Path)):
        return _import_path(plain_path("model", source), dtype, known)
    if not isinstance(source, nn.Module):
        raise InputError(
            f"cannot import a {type(source).__name__}; expected a transformers model, the path of "
            "a checkpoint folder, or an nn.Module from token ids to logits"
        )
    source = getattr(source, "_orig_mod", source)  # torch.compile wraps the model
    if any(parameter.is_meta for parameter in source.parameters()):
        raise InputError("the model is on the meta device, without weights; load them first")
    if hasattr(source, "config") and hasattr(source, "base_model_prefix"):
        _require_transformers()
        from .huggingface import import_object

        return import_object(source, dtype)
    from .torch import import_module

    return import_module(source, dtype)


def _import_path(path: Path, dtype: torch.dtype | None, known: Known) -> Program:
    if not path.exists():
        raise InputError(
            f"{path} does not exist; expected the folder of a checkpoint or of an artifact, or a "
            f".gguf or .onnx file"
        )
    from .onnx.reader import is_onnx

    if is_onnx(path) and not (path / "model.safetensors").exists():
        from .onnx import import_onnx

        return import_onnx(path, dtype, known)
    if not path.is_dir() and path.suffix != ".gguf":
        raise InputError(
            f"{path} is a file; expected the folder of a checkpoint, a .gguf or a .onnx file"
        )
    _require_transformers()
    if not path.is_dir():
        from .gguf import import_gguf

        return import_gguf(path, dtype, known)
    from .huggingface import import_folder

    return import_folder(path, dtype, known)


def kept_assets(path: Path) -> dict[str, Path] | None:
    """The files of a .gguf file's tokenizer by name, where they are kept from an earlier import;
    None if they are not."""
    from .gguf import assets

    return assets.kept_assets(path)


@traces
def import_part(source: Any, part: str, dtype: torch.dtype | None = None) -> Program:
    """A part of a model that `import_model` leaves out, as a program at stage "traced".

    source: a checkpoint folder, or a transformers model that was loaded from one. part: "mtp.0",
    the checkpoint's first layer that predicts a token further ahead (see `huggingface.mtp`). dtype:
    of the floating weights. Errors: `InputError` for a source or checkpoint without the part,
    `UnsupportedError` for one that cannot be traced.
    """
    kind, _, number = part.partition(".")
    if kind != "mtp":
        raise InputError(f"{part!r} is no part of a model that can be imported; expected mtp.0")
    path = source
    if isinstance(source, nn.Module):
        path = getattr(getattr(source, "config", None), "_name_or_path", "") or ""
    folder = Path(path)
    if not str(path) or not (folder / "config.json").is_file():
        raise InputError(
            f"expected a checkpoint folder, because transformers reads no multi-token-prediction "
            f"layers and a model in memory has none; got {str(path) or type(source).__name__!r}"
        )
    _require_transformers()
    from .huggingface.mtp import import_mtp

    return import_mtp(plain_path("model", folder), int(number), dtype)


@traces
def import_masked(source: str | Path, dtype: torch.dtype | None = None) -> Program:
    """A masked language model, whose tokens see all others, as a program at stage "traced".

    source: the folder of a checkpoint (see `huggingface.masked`). dtype: of the floating weights;
    None keeps the source's. Errors: `InputError` for files that are missing or wrong,
    `UnsupportedError` for what cannot be imported.
    """
    folder = _folder_of(source, "masked language model")
    from .huggingface.masked import import_masked_folder

    return import_masked_folder(folder, dtype)


@traces
def import_scoring(source: str | Path, dtype: torch.dtype | None = None) -> Program:
    """A model that scores texts as a program at stage "traced", whose ``logits`` [B,T,labels] are
    scores.

    source: the folder of a checkpoint (see `huggingface.scoring`). dtype and errors: as of
    `import_masked`.
    """
    folder = _folder_of(source, "model that scores texts")
    from .huggingface.scoring import import_scoring_folder

    return import_scoring_folder(folder, dtype)


def _folder_of(source: str | Path, what: str) -> Path:
    """A checkpoint folder. Errors: `InputError`, saying `what` model was expected."""
    path = plain_path("model", source)
    if not path.is_dir():
        raise InputError(f"{path}: expected the folder of a {what} (config.json, safetensors)")
    _require_transformers()
    return path


def _require_transformers() -> None:
    """Before its parts are imported where they are used."""
    also = " (loading and running a saved artifact does not need it)"
    require("transformers", "optimizing a checkpoint", "huggingface", also)
