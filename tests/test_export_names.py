"""Names in exported graphs: every node and value has one of its own, which says where it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnx
import pytest
from archs import ARCHS, build
from tiny import tiny_llama

import graftwork as gw
from graftwork.exporting.loop import export_onnx_loop
from graftwork.exporting.plan import export_onnx_plan
from graftwork.frontends import import_model
from graftwork.ir import Program
from graftwork.passes.engine.manager import run_passes

PLACED = re.compile(r"[A-Za-z_][\w.]*(/[A-Za-z_][\w.]*)+")
"""Places, the innermost last, and what is done there; the second of a kind ends in .2."""


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs_in(attribute.g)


def checked(path: Path) -> dict[str, onnx.NodeProto]:
    """The nodes of a file by name, loops' and branches' included; names are unique and readable."""
    graphs = list(graphs_in(onnx.load(path, load_external_data=False).graph))
    nodes = [node for graph in graphs for node in graph.node]
    held = [value.name for graph in graphs for value in (*graph.input, *graph.initializer)]
    made = [name for node in nodes for name in node.output if name]
    for names in ([node.name for node in nodes], [*held, *made]):
        assert [name for name, count in Counter(names).items() if count > 1] == []
    unplaced = [node.name for node in nodes if not PLACED.fullmatch(node.name)]
    assert unplaced == [], unplaced[:9]
    assert [name for name in held if re.search(r"const\.\d+$", name)] == []
    for node in nodes:  # what belongs to a module says which
        assert not node.doc_string.startswith("model.") or "model." in node.name, node.name
    return {node.name: node for node in nodes}


@cache
def program(recipe: str) -> Program:
    return run_passes(import_model(build(ARCHS["llama"])), gw.Recipe.load(recipe).steps)[0]


def test_a_step_is_named_after_modules(tmp_path: Path) -> None:
    folder = export_onnx_plan(program("baseline"), tmp_path / "plan")
    for path in folder.glob("*.onnx"):
        nodes = checked(path)
        for layer in ("model.layers.0", "model.layers.1"):
            products = {name for name in nodes if name.startswith(layer) and "/MatMul" in name}
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            assert products == {
                *(f"{attention}.q_proj_k_proj_v_proj/MatMul", f"{attention}.o_proj/MatMul"),
                *(f"{mlp}.gate_proj_up_proj/MatMul", f"{mlp}.down_proj/MatMul"),
            }
            assert f"{layer}.input_layernorm/" in " ".join(nodes)
        attends = nodes.get("model.layers.1.self_attn/GroupQueryAttention")
        assert attends is None or "model.layers.1.self_attn/GroupQueryAttention" in attends.output


@pytest.mark.filterwarnings("ignore:.*untrained")
def test_heads_are_named_after_what_they_read(tmp_path: Path) -> None:
    """What has neither module nor weight is where its input was made."""
    folder = export_onnx_plan(program("medusa"), tmp_path / "plan")
    (heads,) = (checked(path) for path in folder.glob("1.*.onnx"))
    assert {"medusa.0.0.linear/MatMul", "medusa.0.0.linear/QuickGelu"} <= heads.keys()
    for path in folder.glob("0.*.onnx"):
        checked(path)


@pytest.mark.parametrize("sample", [False, True])
def test_a_loop_says_what_is_done_when(sample: bool, tmp_path: Path) -> None:
    """The step within the pass, and what is chosen, verified, kept and drafted around it."""
    folder = export_onnx_loop(program("copyspec"), tmp_path / "loop", sample=sample)
    names = checked(folder / "generate.onnx").keys()
    parts = {name.split("/")[1] for name in names if name.startswith("generate.pass/")}
    assert {"feed", "verify", "ends", "keep", "draft"} <= parts
    assert ("draw" in parts) == sample and "kv.0.key" in parts
    assert "step/model.layers.1.mlp.down_proj/MatMul" in names
    constants = onnx.load(folder / "generate.onnx", load_external_data=False).graph.initializer
    assert "step/i64[-1]" in {tensor.name for tensor in constants}


def test_programs_without_modules(tmp_path: Path) -> None:
    """Weights say where one is."""
    made = run_passes(tiny_llama(2), gw.Recipe.load("baseline").steps)[0]
    folder = export_onnx_plan(made, tmp_path / "plan")
    nodes = checked(folder / "0.chain.onnx")
    assert {"layers.1.q_k_v/MatMul", "layers.1.q_k_v/RotaryEmbedding"} <= nodes.keys()
