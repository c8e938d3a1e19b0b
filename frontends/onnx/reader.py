"""Opens ONNX files: finds the model in a folder, checks its files, gives its graph.

Weights stay in their files until they are asked for. What a program cannot say is refused here,
before anything is traced: control flow, ops of strange domains, files that lead out of the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as oir
from onnx_ir.passes.common import InlinePass

from ...ir import InputError, UnsupportedError
from ...ir.files import SMALL, read_bytes

MOST = 2**31 - 1
"""Bytes that a protocol buffer can have."""

CONFIG = "genai_config.json"
CONTROL = ("If", "Loop", "Scan")
DOMAINS = ("", "ai.onnx", "com.microsoft")


def is_onnx(path: Path) -> bool:
    """Whether a path is a model in ONNX: such a file, or a folder with one and no checkpoint."""
    if path.suffix == ".onnx":
        return True
    if not path.is_dir():
        return False
    return (path / CONFIG).is_file() or any(path.glob("*.onnx"))


def model_file(path: Path) -> Path:
    """The file of the decode graph. Errors: `InputError` for a folder with none or with several."""
    if not path.is_dir():
        return path
    if (path / CONFIG).is_file():
        decoder = genai_config(path).get("model", {}).get("decoder", {})
        return _inside(path, str(decoder.get("filename", "model.onnx")))
    if (path / "model.onnx").is_file():
        return path / "model.onnx"
    found = sorted(path.glob("*.onnx"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise InputError(
            f"{path} has {len(found)} .onnx files and none is called model.onnx ({names}): give "
            f"the decoder's path. Folders of loops and plans are for running, not for optimizing"
        )
    return found[0]


def genai_config(folder: Path) -> dict[str, Any]:
    """genai_config.json. Errors: `InputError` if it is no JSON object."""
    try:
        said = json.loads(read_bytes(folder / CONFIG, SMALL))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {folder / CONFIG}: {error}") from error
    if not isinstance(said, dict):
        raise InputError(f"{folder / CONFIG}: expected an object")
    return said


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder} names {name!r}, which lies outside of it")
    return path


def read_model(path: Path) -> oir.Model:
    """The model in a file, its functions opened. Errors: `InputError` for a file that is missing,
    damaged or too large, or whose external data is missing or lies elsewhere; `UnsupportedError`
    for control flow and ops of other domains."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read the model: {error}") from error
    if size > MOST:
        raise InputError(
            f"{path} has {size:,} bytes, and no protocol buffer has more than {MOST:,}: save it "
            f"with its weights as external data"
        )
    try:
        model = oir.load(path)
    except Exception as error:  # protobuf's and onnx_ir's own
        raise InputError(f"{path} is no ONNX model that can be read: {error}") from error
    if model.functions:
        model = InlinePass()(model).model
    _check_ops(path, model.graph)
    _check_data(path, model.graph)
    return model


def _check_ops(path: Path, graph: oir.Graph) -> None:
    for node in graph:
        where = f"{path}: node {node.name or node.outputs[0].name}"
        if node.op_type in CONTROL and node.domain in DOMAINS:
            raise UnsupportedError(
                f"{where} is a {node.op_type}; a decode graph has no control flow. Give the model "
                f"that it was exported from, or an export of its step alone"
            )
        if node.domain not in DOMAINS:
            raise UnsupportedError(
                f"{where} is {node.domain}.{node.op_type}; known are ONNX's own ops and ONNX "
                f"Runtime's (com.microsoft)"
            )


def _check_data(path: Path, graph: oir.Graph) -> None:
    folder = path.parent
    sizes: dict[str, int] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, oir.ExternalTensor):
            continue
        location = str(tensor.location)
        if location not in sizes:
            file = _inside(folder, location)
            if not file.is_file():
                raise InputError(
                    f"{path}: the weight {name} lies in {location!r}, which is not there; put it "
                    f"beside the model"
                )
            sizes[location] = file.stat().st_size
        end = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
        if end > sizes[location]:
            raise InputError(
                f"{path}: the weight {name} ends at byte {end:,} of {location!r}, which has "
                f"{sizes[location]:,}; copy it again"
            )
