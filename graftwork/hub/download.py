"""A model's id on the Hub becomes a folder: configuration, tokenizer and safetensors, no code."""

from __future__ import annotations

import importlib.resources
import os
import re
import shutil
from pathlib import Path
from typing import Any, TypeVar

from ..ir import InputError
from ..ir.support.cache_folder import cache_folder
from ..ir.support.packages import installing
from ..ir.support.scratch import replacing

T = TypeVar("T")

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_FILES = (".gguf", ".onnx", ".json", ".yaml")
ARTIFACT = "program.gw"
"""What an artifact has, and a checkpoint has not."""

BUNDLED = "graftwork/demo_model"
"""The bundled model's path in a clone; it is that model wherever the package is installed."""

WANTED = ("*.safetensors", "*.json", "*.gw", "*.jinja", "*.txt", "*.model")
"""Files that are fetched: never code, nor weights in formats that may hold some."""


def local(source: T, revision: str | None = None) -> T | Path:
    """A source as it is, or, of ``org/name`` (``org/name@revision``), the folder that the Hub's
    files of that name are in.

    revision: a branch, tag or commit; default: the main branch. What exists as a path, or lies in a
    folder that does, is one. Errors: `InputError` for a revision of what is no id, without
    huggingface_hub, and for whatever goes wrong on the way, with how to get a folder.
    """
    if source == BUNDLED and revision is None and not Path(BUNDLED).exists():
        return Path(str(importlib.resources.files("graftwork.demo_model")))
    found = _ID.fullmatch(source) if isinstance(source, str) else None
    name, given = found.groups() if found else ("", None)
    path = name.endswith(_FILES) or (found and (Path(name).exists() or Path(name).parent.exists()))
    if not found or path:
        if revision is not None:
            raise InputError(f"revision={revision!r}: {source} is no id of the Hub, org/name")
        return source
    if given and revision and given != revision:
        raise InputError(f"both {source} and revision={revision!r} are given; give one")
    return _snapshot(name, given or revision)


def _snapshot(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name}: there is no such folder, and getting it from the Hub needs huggingface_hub: "
            f"{installing('huggingface')}"
        ) from error
    known: tuple[Any, ...] = (HfHubHTTPError, HFValidationError, OSError, ValueError)
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(WANTED), ignore_patterns=["*/*"]
        )
    except known as error:
        raise _missing(name, revision, _told(error)) from None
    except Exception as error:
        # What the connection raises, of whichever library it is.
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise _missing(name, revision, _told(error)) from None
    found = Path(folder)
    if not any(found.glob("*.safetensors")):
        raise _missing(name, revision, "it has no safetensors, and no other weights are read")
    return _as_files(found, name) if (found / ARTIFACT).exists() else found


def _as_files(folder: Path, name: str) -> Path:
    """An artifact as files: the Hub's cache is made of links, and loading one follows none."""
    made = cache_folder() / "hub" / name.replace("/", "--") / folder.name
    if made.is_dir():
        return made
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(made) as partial:
        for file in filter(Path.is_file, folder.iterdir()):
            try:
                os.link(file.resolve(), partial / file.name)
            except OSError:  # on another disk
                shutil.copyfile(file, partial / file.name)
    return made


def _told(error: Exception) -> str:
    """What went wrong, in a line. The exceptions below it are the connection's, and say no more."""
    return " ".join(str(error).split())[:300].rstrip(".")


def _missing(name: str, revision: str | None, why: str) -> InputError:
    which = f" --revision {revision}" if revision else ""
    return InputError(
        f"{name}: there is no such folder here, and none came from the Hub: {why}. Where there is "
        f"a network: hf download {name}{which} --local-dir {name.partition('/')[2]}, and give that "
        f"folder"
    )
