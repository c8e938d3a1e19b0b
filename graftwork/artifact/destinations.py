"""Checks of output paths before the work starts."""

from __future__ import annotations

import os
from pathlib import Path

from ..ir import InputError
from ..ir.support.files import plain_path

MARKS = {
    "onnx": "model.onnx",
    "genai": "model.onnx",
    "onnx-loop": "generate.onnx",
    "onnx-plan": "plan.json",
    "compressed-tensors": "",
    "vllm-medusa": "",
    "speculators": "",
}
"""By export format, the file that identifies an older export, which may be replaced; "": none."""


def check_folder(folder: str | Path, ours: str = "") -> Path:
    """Check that a folder can be created or replaced. ours: a file that identifies an older result,
    which may be replaced; "": the folder must be new or empty. Errors: `InputError`."""
    folder = plain_path("export", folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} exists and is not a folder: give another place")
    if folder.is_dir() and any(folder.iterdir()) and not (ours and (folder / ours).exists()):
        raise InputError(
            f"{folder} is not an empty folder, and holds something else than what is written there"
        )
    check_above(folder)
    return folder


def check_file(file: Path | None, option: str) -> None:
    """Check that the file of an option can be written; None passes. Errors: `InputError`."""
    if file is None:
        return
    if file.is_dir():
        raise InputError(f"{option} {file}: that is a folder: give a file's name")
    if not file.parent.exists():
        raise InputError(f"{option} {file}: there is no folder {file.parent}")
    check_above(file)


def check_above(path: Path) -> None:
    """Check that the nearest existing parent is a writable folder. Errors: `InputError`."""
    above = next(p for p in Path(os.path.abspath(path)).parents if os.path.lexists(p))
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: no permission to write in {above}")
