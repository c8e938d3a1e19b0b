"""Programs as pictures: layers that are alike are drawn once, changes of passes are told, and no
text of a model becomes markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from handmade import Shape, llama
from small_llama import small_llama

from graftwork.cli import main
from graftwork.drawing.changes import CAME, CHANGED, WENT, Line, Watch
from graftwork.drawing.fold import folded
from graftwork.drawing.inspected import program_page
from graftwork.drawing.layout import layout
from graftwork.drawing.svg import program_svg
from graftwork.ir import PassRecord, Program, TensorType
from graftwork.optimizing import trace
from graftwork.recipe import Recipe

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def watched() -> tuple[Program, Watch]:
    """A llama of four layers after Medusa's passes, and what these changed."""
    watch = Watch()
    model = small_llama(64, 0, num_hidden_layers=4)
    return trace(model, Recipe.load("medusa"), target="eager", watch=watch), watch


def texts(svg: str) -> list[str]:
    return [el.text or "" for el in ET.fromstring(svg).iter(f"{NAMESPACE}text")]


def test_layers_that_are_alike_are_one_block(watched: tuple[Program, Watch]) -> None:
    blocks = folded(watched[0].step)
    assert [block.title for block in blocks] == [
        *("before the layers", "layer 0", "layers 1-2 (2 alike)", "layer 3", "after the layers")
    ]
    _, first, whole, last, _ = blocks
    assert (whole.beside, first.beside) == ("", whole.title)
    assert [text.split()[0] for text in first.more] == ["rms_norm"]
    assert [text.split()[0] for text in first.less] == ["add_rms_norm"]
    assert [text.split()[0] for text in last.more] == ["add.Tensor", "pick_rows"]


def test_a_layer_with_another_window_differs_by_its_mask() -> None:
    # Without sites, by the names of weights; the last sum is then behind the layers.
    blocks = {block.title: block for block in folded(llama(Shape(5, window=4, whole=(2,))).step)}
    alike, other = blocks["layers 0-1, 3 (3 alike)"], blocks["layer 2"]
    assert (alike.beside, other.beside) == ("", alike.title)
    assert len(other.more) == len(other.less) == 1
    assert "window=4" in other.less[0] and "window" not in other.more[0]


def test_a_layer_of_another_width_is_not_alike() -> None:
    program = llama(Shape(layers=4))
    graph = program.step.copy()
    weights = graph.graph.find_nodes(op="get_attr")
    (node,) = [n for n in weights if "layers.1." in str(n.target) and "down" in str(n.target)]
    node.meta = {**node.meta, "type": TensorType.parse("f32[7,7]")}
    assert [block.title for block in folded(graph) if block.layers] == [
        *("layers 0, 2 (2 alike)", "layer 1", "layer 3")
    ]


def test_the_picture_is_xml_with_every_block_once(watched: tuple[Program, Watch]) -> None:
    shown = texts(program_svg(watched[0], "medusa"))
    assert shown.count("layers 1-2 (2 alike)") == 1
    assert "+ add.Tensor f32[B,T,32]" in shown
    assert "function step" in shown and "draft function medusa" in shown
    assert any(text.startswith("plan: draft = heads") for text in shown)
    assert "[1] f32[B,T,16]" in shown  # a type on an edge
    # 4 attentions in 3 blocks, of which one is drawn
    assert shown.count("attend") == 1


def test_changes_of_a_pass(watched: tuple[Program, Watch]) -> None:
    found = {change.record.name: change for change in watched[1].found}
    assert [*found] == [record.name for record in watched[0].provenance]
    lines = found["fuse_qkv"].functions["step"]
    went = [line for line in lines if line.mark == WENT]
    assert [(line.count, line.layers) for line in went] == [(4, "0-3")] * 3
    assert all(line.text.startswith("linear self_attn.") for line in went)
    came = [line for line in lines if line.mark == CAME]
    assert [line.text.split()[0] for line in came] == ["linear", "split_with_sizes"]
    assert Line(CAME, "kv.*.key f32[B,2,C,8]", 4) in found["insert_kv_cache"].others["states"]
    assert found["insert_kv_cache"].others["stage"] == (Line(CHANGED, "canonical  →  cached"),)
    assert "medusa" in found["draft_medusa"].functions
    assert not found["raise_activations"].functions


def test_a_changed_option_is_a_change() -> None:
    watch = Watch()
    program = llama(Shape())
    step = program.step.copy()
    for node in step.calls():
        if "scale" in node.kwargs:
            node.kwargs = {**node.kwargs, "scale": 3.0}
    watch(program)
    record = PassRecord("by_hand", (), "exact", 1, 0.0)
    watch(program.with_function(step, provenance=(record,)))
    (line,) = watch.found[0].functions["step"]
    assert (line.mark, line.count, line.layers) == (CHANGED, 2, "0-1")
    assert "scale=3" in line.text.partition("→")[2]


def test_the_page_is_one_file_and_its_text_is_no_markup(watched: tuple[Program, Watch]) -> None:
    info = replace(watched[0].info, model_type="<script>alert(1)</script>")
    program = watched[0].replace(info=info)
    page = program_page(program, watched[1].found, '"><img onerror=alert(1)>')
    ET.fromstring(program_svg(program, "<b>&\x00\ud800").encode())
    assert "<script" not in page and "<img" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)\s*=|url\((?!#)|@import""", page)
    assert "default-src 'none'" in page
    assert page.count("<details") == len(watched[1].found) + len(program.functions)
    without = program_page(program)  # as of an artifact
    assert "tree_static" in without and without.count("<details") == len(program.functions)


def test_boxes_do_not_overlap_and_edges_lead_down() -> None:
    sizes = {name: (50.0, 20.0) for name in "abcdefg"}
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d"), ("a", "g"), ("e", "f")]
    placed = layout(sizes, edges, 30.0)
    for one in sizes:
        for other in sizes:
            if one < other and placed.at[one][1] == placed.at[other][1]:
                assert abs(placed.at[one][0] - placed.at[other][0]) >= 50
    assert all(placed.at[a][1] < placed.at[b][1] for a, b in edges)
    assert len(placed.through["a", "d"]) == 1  # it passes the row of b and c
    assert all(25 <= x <= placed.width - 25 for x, _ in placed.at.values())
    assert layout({}, [], 30.0).at == {}


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_llama(64, 0).save_pretrained(tmp_path / "model")
    svg, page = tmp_path / "p.svg", tmp_path / "p.html"
    command = ["inspect", str(tmp_path / "model"), "--recipe", "baseline", "--target", "eager"]
    with pytest.raises(SystemExit) as caught:
        main([*command, "--svg", str(svg), "--html", str(page)])
    assert not caught.value.code
    assert not capsys.readouterr().out
    assert "function step" in texts(svg.read_text(encoding="utf-8"))
    assert "insert_kv_cache" in page.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main([*command, "--svg", str(tmp_path / "none" / "p.svg")])
    assert caught.value.code == 2 and "none" in capsys.readouterr().err
