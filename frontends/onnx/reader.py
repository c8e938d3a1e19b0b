"""Opens ONNX files: finds the model in a folder, checks its files, gives its graph.

Weights stay in their files until they are asked for. What a program cannot say is refused here,
before anything is traced: control flow, ops of strange domains, files that lead out of the folder,
values that nothing makes or that two nodes make, and graphs larger than any decode graph.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx_ir as oir
from onnx_ir.passes.common import InlinePass

from ...ir import InputError, UnsupportedError
from ...ir.support.files import check_regular, plain_path
from ...ir.support.names import shown
from ..generation import read_object

MOST = 2**31 - 1
"""Bytes that a protocol buffer can have."""

MOST_NODES = 2**14
"""Nodes that are no constants. torch.onnx's wordiest form of a step has 150 a layer, and a trace
takes some milliseconds for each."""

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
        decoder = section(section(genai_config(path), "model"), "decoder")
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
    return read_object(folder / CONFIG)


def section(said: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a configuration, empty if it is not there. Errors: `InputError`."""
    found = said.get(name, {})
    if not isinstance(found, dict):
        raise InputError(f"{CONFIG}: {name}: expected an object, got {shown(found)}")
    return found


def _inside(folder: Path, name: str) -> Path:
    path = plain_path(f"a file that {folder} names", folder / name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder} names {shown(name)}, which lies outside of it")
    return path


def read_model(path: Path) -> oir.Model:
    """The model in a file, its functions opened. Errors: `InputError` for a file that is missing,
    damaged or too large, or whose external data is missing or lies elsewhere; `UnsupportedError`
    for control flow and ops of other domains."""
    try:
        check_regular(path)
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
        raise InputError(f"{path} is no ONNX model that can be read: {_first(error)}") from error
    _check_size(path, model)
    if model.functions:
        try:
            model = InlinePass()(model).model
        except Exception as error:  # onnx_ir's own
            raise InputError(
                f"{path}: its functions cannot be put in place of their calls: {_first(error)}"
            ) from error
    _check_ops(path, model.graph)
    _check_values(path, model.graph)
    _check_data(path, model.graph)
    return model


def _first(error: BaseException) -> str:
    """What the error says that was the first of those that led to it, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_size(path: Path, model: oir.Model) -> None:
    """Nodes are counted as they are once functions stand in place of their calls: functions that
    call functions make of a few lines as many as anybody likes."""
    calls = {
        name: [node.op_identifier() for node in function.all_nodes()]
        for name, function in model.functions.items()
    }
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        raise InputError(f"{path}: its functions call each other in a circle") from error
    sizes: dict[oir.OperatorIdentifier, int] = {}
    for name in order:
        inner = sum(sizes.get(call, 1) for call in calls[name]) if name in calls else 1
        sizes[name] = min(inner, MOST_NODES + 1)
    count = sum(
        sizes.get(node.op_identifier(), 1)
        for node in model.graph.all_nodes()
        if node.op_type != "Constant"
    )
    if count > MOST_NODES:
        raise UnsupportedError(
            f"{path} has more than {MOST_NODES:,} nodes, its functions put in place of their "
            f"calls; no decode graph has so many"
        )


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


def _check_values(path: Path, graph: oir.Graph) -> None:
    """That every value is made once, and before it is read."""
    made = set(graph.inputs) | set(graph.initializers.values())
    names = {value.name for value in made}
    for node in graph:
        where = f"{path}: node {shown(node.name or node.op_type)}"
        for value in node.inputs:
            if value is not None and value not in made:
                raise InputError(
                    f"{where} reads {shown(value.name)}, which nothing before it makes"
                )
        for value in node.outputs:
            if value.name and value.name in names:
                raise InputError(f"{where} makes {shown(value.name)}, which is made already")
            made.add(value)
            names.add(value.name)
    for value in graph.outputs:
        if value not in made:
            raise InputError(f"{path}: nothing makes its output {shown(value.name)}")


def _check_data(path: Path, graph: oir.Graph) -> None:
    folder = path.parent
    sizes: dict[str, int] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            raise InputError(f"{path}: the weight {shown(name)} has no values")
        if not isinstance(tensor, oir.ExternalTensor):
            _check_held(path, tensor)
            continue
        location = str(tensor.location)
        if location not in sizes:
            file = _inside(folder, location)
            if not file.is_file():
                raise InputError(
                    f"{path}: the weight {shown(name)} lies in {shown(location)}, which is not "
                    f"there; put it beside the model"
                )
            sizes[location] = file.stat().st_size
        try:
            needed = tensor.nbytes
        except TypeError as error:  # of texts, or of no type
            raise UnsupportedError(
                f"{path}: the weight {shown(name)} is {tensor.dtype.name}, which is not supported"
            ) from error
        start, length = tensor.offset or 0, tensor.length or needed
        if start < 0 or not 0 <= needed <= length:
            raise InputError(
                f"{path}: the weight {shown(name)} takes {length} bytes from byte {start} of "
                f"{shown(location)}, and its size asks for {needed}; export it again"
            )
        if (end := start + length) > sizes[location]:
            raise InputError(
                f"{path}: the weight {shown(name)} ends at byte {end:,} of {shown(location)}, "
                f"which has {sizes[location]:,}; copy it again"
            )


def _check_held(path: Path, tensor: oir.TensorProtocol) -> None:
    """That the bytes within the file are as many as a weight's size asks for."""
    try:
        fits = list(tensor.numpy().shape) == list(tensor.shape)
    except Exception as error:  # numpy's and onnx_ir's own
        raise InputError(
            f"{path}: the weight {shown(tensor.name)} cannot be read: {_first(error)}"
        ) from error
    if not fits:
        raise InputError(f"{path}: the weight {shown(tensor.name)} has another size than it says")
