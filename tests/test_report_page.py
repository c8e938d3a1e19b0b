"""Reports as pages, and what notebooks show of models, recipes, reports and programs."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from small_llama import small_llama

import graftwork as gw
from graftwork.cli import main
from graftwork.drawing.parts import weights_by_part
from graftwork.report import Cost
from graftwork.runtime.stats import Stats, by_depth

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


@pytest.fixture(scope="module")
def drafting() -> gw.Model:
    repeating = small_llama(64, 0, max_position_embeddings=256, initializer_range=0.1)
    return gw.optimize(repeating, "copyspec", target="eager")


def test_a_report_tells_what_was_done_so_far(drafting: gw.Model) -> None:
    report = drafting.report
    assert report is not None
    before = report.html()
    assert "nothing was drafted yet" in before and "caches" not in before
    out = drafting.generate(PROMPT, max_new_tokens=60, return_dict_in_generate=True)
    again = drafting.generate(PROMPT.flip(1), max_new_tokens=20, return_dict_in_generate=True)
    runs = [found.stats.accepted_runs for found in (out, again)]
    assert sum(run * count for each in runs for run, count in each.items()) > 0
    together = {run: sum(each.get(run, 0) for each in runs) for run in {*runs[0], *runs[1]}}
    assert report.acceptance() == by_depth(together)
    page = report.html()
    assert f"{report.acceptance()[0]:.1%}" in page and "caches" in page
    assert "draft_suffix" in page and "weights of layers: mlp" in page
    assert not re.search(r"<script|src=|@import|url\(", page)


def test_drafts_that_a_loop_or_a_step_verifies_are_counted_alike() -> None:
    stats = Stats()
    for drafted, accepted in ((4, 4), (4, 0), (0, 0), (2, 1)):
        stats.verified(drafted, accepted)
    assert (stats.draft_tokens, stats.accepted_tokens) == (10, 5)
    assert stats.accepted_by_depth == pytest.approx((2 / 3, 1 / 3, 1 / 3, 1 / 3))
    assert stats.to_dict()["accepted_by_depth"] == stats.accepted_by_depth
    assert by_depth({}) == ()


def test_quality_and_hostile_text() -> None:
    made = gw.optimize(small_llama(64, 0), "int8", target="eager")
    cost = Cost(
        text="<b>&", tokens=9, divergence=0.25, ratio=1.5, error=0.1, agreement=0.5, speed=2.0
    )
    made.tell(cost, note="<script>alert(1)</script>")
    assert made.report is not None
    page = made.report.html()
    assert "0.25000 nats a token" in page and "1.5000 ± 0.1000" in page
    assert "<b>&" not in page and "<script" not in page and "&lt;script&gt;" in page
    copy = made.report.model_copy()
    copy._model = None
    assert "Memory" not in copy.html()  # the model is unknown


def test_bytes_of_parts_are_all_bytes(drafting: gw.Model) -> None:
    parts = weights_by_part(drafting.program)
    assert sum(parts.values()) == sum(w.type.nbytes for w in drafting.program.weights.values())
    assert {"layers: mlp", "layers: self_attn", "model.embed_tokens"} <= parts.keys()


def test_what_notebooks_show(drafting: gw.Model) -> None:
    recipe = gw.Recipe.load("medusa")
    for thing in (drafting, drafting.report, recipe, drafting.program):
        shown = thing._repr_html_()  # type: ignore[union-attr]
        ElementTree.fromstring(shown)
        assert len(shown) < 60_000
    assert "Cai et al." in recipe._repr_html_() and "draft_medusa" in recipe._repr_html_()
    assert "draft = suffix" in drafting._repr_html_()
    hostile = gw.Recipe.load({"name": "x", "title": "<img src=x>", "passes": ["canonicalize"]})
    assert "<img" not in hostile._repr_html_()


def test_optimize_writes_the_page(tmp_path: Path) -> None:
    small_llama(64, 0).save_pretrained(tmp_path / "model")
    page = tmp_path / "report.html"
    command = ["optimize", str(tmp_path / "model"), "--dry-run", "--target", "eager"]
    with pytest.raises(SystemExit) as caught:
        main([*command, "--html", str(page)])
    assert not caught.value.code
    assert "insert_kv_cache" in page.read_text(encoding="utf-8")
