"""ONNX files that are damaged, too large, or made to do harm: refused by name, and soon."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from test_frontends_onnx import LOOK_UP, graph_of

from graftwork.frontends import import_model
from graftwork.frontends.onnx.reader import MOST_NODES
from graftwork.ir import GraftworkError, InputError, UnsupportedError

OWN = "own"


def refused(path: Path, message: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=message):
        import_model(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("folder", [False, True])
def test_pipes_and_devices(folder: bool, tmp_path: Path) -> None:
    """They are refused before anything waits for them or reads them without end."""
    path = tmp_path / "model.onnx"
    os.mkfifo(path)
    refused(tmp_path if folder else path, "pipe, not a regular file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(tmp_path if folder else path, "device, not a regular file")


def calling(depth: int, back: bool = False) -> onnx.ModelProto:
    """Functions of which each calls the one before twice; back: and the first calls the last."""
    functions = []
    for level in range(depth):
        first = "Neg" if level == 0 else f"f{level - 1}"
        if level == 0 and back:
            first = f"f{depth - 1}"
        domain = "" if first == "Neg" else OWN
        nodes = [helper.make_node(first, [a], [b], domain=domain) for a, b in ("xy", "yz")]
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(OWN, 1)]
        functions.append(helper.make_function(OWN, f"f{level}", ["x"], ["z"], nodes, opsets))
    model = graph_of(LOOK_UP, helper.make_node(f"f{depth - 1}", ["x"], ["logits"], domain=OWN))
    model.opset_import.append(helper.make_opsetid(OWN, 1))
    model.functions.extend(functions)
    return model


def test_functions_that_call_functions(tmp_path: Path) -> None:
    """A few lines that stand for 2^40 nodes are refused before they are written out; a few calls
    are put in place."""
    path = tmp_path / "model.onnx"
    onnx.save(calling(40), path)
    assert path.stat().st_size < 8000
    refused(path, f"more than {MOST_NODES:,} nodes")
    onnx.save(calling(3, back=True), path)
    refused(path, "call each other in a circle")
    onnx.save(calling(3), path)
    refused(path, "no attention")


def test_chains_without_end(tmp_path: Path) -> None:
    names = ["x", *(f"x{i}" for i in range(20_000)), "logits"]
    nodes = [helper.make_node("Neg", [a], [b]) for a, b in pairwise(names)]
    onnx.save(graph_of(LOOK_UP, *nodes), tmp_path / "model.onnx")
    refused(tmp_path, f"more than {MOST_NODES:,} nodes")


def node(op: str, *names: str, outputs: tuple[str, ...] = ("logits",), **given: Any) -> Any:
    return helper.make_node(op, list(names), list(outputs), name="n", **given)


def tensor(values: Any, kind: int = TensorProto.INT64) -> Any:
    return helper.make_tensor("", kind, np.shape(values), np.ravel(values))


def many(op: str, times: int, value: int) -> list[Any]:
    """An op on a known number and itself, again and again."""
    first = helper.make_node("Constant", [], ["c0"], value=tensor([value]))
    more = {"axis": 0} if op == "Concat" else {}
    steps = [helper.make_node(op, [f"c{i}", f"c{i}"], [f"c{i + 1}"], **more) for i in range(times)]
    return [LOOK_UP, first, *steps, node("Reshape", "x", f"c{times}")]


WRONG: dict[str, tuple[list[Any], str]] = {
    "nothing makes it": ([LOOK_UP, node("Neg", "y")], "node 'n' reads 'y', which nothing before"),
    "in a circle": (
        [LOOK_UP, node("Add", "x", "b", outputs=("a",)), node("Neg", "a", outputs=("b",))],
        "node 'n' reads 'b', which nothing before",
    ),
    "made twice": (
        [LOOK_UP, node("Neg", "x"), node("Abs", "x")],
        "'logits'|more than once|already",
    ),
    "no output": ([LOOK_UP, node("Neg", "x", outputs=("y",))], "nothing makes its output 'logits'"),
    "results": ([LOOK_UP, node("Neg", "x", outputs=("logits", "y"))], "has 2 results; expected 1"),
    "a product of one": ([LOOK_UP, node("MatMul", "x")], r"node n \(MatMul\)"),
    "an axis of nothing": (
        [
            LOOK_UP,
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0, name="s"),
            node("Squeeze", "s", "s"),
        ],
        r"node n \(Squeeze\)",
    ),
    "a long shape": (many("Concat", 40, 1), r"\(Concat\): a shape, .* of 8192 numbers"),
    "a large product": (many("Mul", 60, 3), r"\(Mul\): a number that has more than 64 bits"),
    "a large power": (many("Pow", 4, 99), r"\(Pow\): a number that has more than 64 bits"),
    "a large constant": (
        [
            LOOK_UP,
            helper.make_node("Constant", [], ["c"], value=tensor([2**40])),
            helper.make_node("ConstantOfShape", ["c"], ["y"], value=tensor([7])),
            node("Add", "x", "y"),
        ],
        r"node n \(Add\)|larger|memory|GiB|no attention",
    ),
    "no attribute": (
        [LOOK_UP, node("MatMulNBits", "x", "table", "table", domain="com.microsoft")],
        r"node n \(MatMulNBits\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_graphs_that_are_wrong(case: str, tmp_path: Path) -> None:
    nodes, message = WRONG[case]
    onnx.save(graph_of(*nodes), tmp_path / "model.onnx")
    refused(tmp_path, message)


def cut(model: onnx.ModelProto) -> None:
    weight = model.graph.initializer[0]
    weight.ClearField("float_data")
    weight.raw_data = bytes(40)


def texts(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor("table", TensorProto.STRING, [2], [b"a", b"b"])
    )


def outside(offset: int, length: int, location: str = "data.bin") -> Callable[[Any], None]:
    def change(model: onnx.ModelProto) -> None:
        weight = model.graph.initializer[0]
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        said = {"location": location, "offset": str(offset), "length": str(length)}
        for key, value in said.items():
            weight.external_data.add(key=key, value=value)

    return change


def of_no_type(model: onnx.ModelProto) -> None:
    outside(0, 256)(model)
    model.graph.initializer[0].data_type = TensorProto.STRING


def saying(name: str, text: str) -> Callable[[Any], None]:
    def change(model: onnx.ModelProto) -> None:
        model.metadata_props.add(key=name, value=text)

    return change


DAMAGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "cut": (cut, "weight 'table' cannot be read"),
    "texts": (texts, "weight 'table' is STRING, which is not supported"),
    "before the file": (outside(-64, 256), "no ONNX model|from byte -64 of 'data.bin'"),
    "less than its size": (outside(0, 64), "takes 64 bytes .* its size asks for 256"),
    "of no type": (of_no_type, "weight 'table' is STRING, which is not supported"),
    "behind the file": (outside(4096, 256), "ends at byte 4,352 of 'data.bin', which has 256"),
    "a zero byte": (outside(0, 256, "a\0b"), "no path|no ONNX model"),
    "elsewhere": (outside(0, 256, "../data.bin"), "lies outside of it"),
    "ends": (saying("eos_token_id", "[[2]]"), "eos_token_id: expected a whole number, got"),
    "context": (saying("context_length", '"x"'), "context_length: expected a whole number"),
    "no number": (saying("bos_token_id", "{"), "metadata says bos_token_id='{'"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_files_that_are_damaged(case: str, tmp_path: Path) -> None:
    change, message = DAMAGED[case]
    model = graph_of(LOOK_UP, node("Neg", "x"))
    change(model)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "data.bin").write_bytes(bytes(256))
    (tmp_path / "in" / "model.onnx").write_bytes(model.SerializeToString())
    refused(tmp_path / "in", message)


@pytest.mark.parametrize(
    "text", ['{"model": 3}', '{"model": {"decoder": []}}', "[" * 100_000, '{"model": {"type": {}}}']
)
def test_configurations_that_are_wrong(text: str, tmp_path: Path) -> None:
    onnx.save(graph_of(LOOK_UP, node("Neg", "x")), tmp_path / "model.onnx")
    (tmp_path / "genai_config.json").write_text(text)
    with pytest.raises(GraftworkError):
        import_model(tmp_path)
