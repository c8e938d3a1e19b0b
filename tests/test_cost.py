"""What recipes cost a text, as the report of `optimize` says it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graftwork as gw
from graftwork.cli.demo import demo_folder
from graftwork.data import cost as costs
from graftwork.data.corpus import SAMPLE
from graftwork.data.cost import cost_of, why_not
from graftwork.report import Report

DEMO = str(demo_folder())
TARGET = "eager:cpu:float32"


@pytest.fixture(scope="module")
def plain() -> gw.Model:
    return gw.optimize(DEMO, target=TARGET)


def saying(program: Any, chances: list[list[float]]) -> Any:
    """A model that gives every window the same chances of each next token, [T,V]."""
    logits = torch.tensor(chances).log()

    class Model(SimpleNamespace):
        def __call__(self, ids: torch.Tensor, prompt: int = 1) -> torch.Tensor:
            return logits[: ids.shape[1]][None]

    return Model(program=program, report=None)


def test_a_case_by_hand(plain: gw.Model) -> None:
    """Of the text 0 1 1 the model gives its tokens 1/2 and 1/4, and the recipe 1/4 and 1/4."""
    program = plain.program.replace(info=plain.program.info)
    given = saying(program, [[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]])
    made = saying(program, [[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]])
    found = cost_of(made, given, [[0, 1, 1]])
    apart = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.tokens == 2 and found.error == 0.0
    assert found.divergence == pytest.approx(apart / 2, rel=1e-5)
    assert found.ratio == pytest.approx(math.sqrt(2), rel=1e-5)
    assert found.agreement == 1.0  # the first of two that are as likely


def test_what_a_recipe_rules_out_has_no_finite_perplexity(plain: gw.Model) -> None:
    program = plain.program.replace(info=plain.program.info)
    given, made = (saying(program, [[p, 1 - p]] * 3) for p in (0.5, 1e-30))
    found = cost_of(made, given, [[1, 0, 0]])
    assert found.ratio == found.perplexity == costs.LARGEST and found.error == 0.0
    assert found.divergence == pytest.approx(0.5 * math.log(1e30), rel=0.03)


def test_a_model_costs_nothing_beside_itself(plain: gw.Model) -> None:
    found = cost_of(plain, plain)
    assert (found.divergence, found.ratio, found.error, found.agreement) == (0.0, 1.0, 0.0, 1.0)
    tokens = len(plain.tokenizer.encode(SAMPLE.read_text()).ids)
    assert 0.8 * tokens < found.tokens < tokens


@pytest.mark.long
def test_the_report_says_it_and_keeps_it(tmp_path: Path) -> None:
    few = gw.optimize(DEMO, "int8", target=TARGET, cost=True)
    assert few.report is not None and few.report.cost is not None
    assert 0 < few.report.cost.divergence < 0.1 and few.report.cost.agreement > 0.9
    assert "KL 0.0" in str(few.report) and "on a bundled text" in str(few.report)
    few.save(tmp_path / "kept")
    assert gw.load(tmp_path / "kept").report == few.report
    assert Report.model_validate_json(few.report.model_dump_json()).cost == few.report.cost
    given = gw.optimize(DEMO, "int8", target=TARGET, cost=["def area(width): return width\n" * 9])
    assert given.report is not None and "on the given text" in str(given.report)


@pytest.mark.long
def test_rows_that_are_dropped_late_cost_something() -> None:
    """A window of 256 tokens would end before the first row is dropped."""
    recipe = gw.Recipe.load("streaming_llm").with_options(["evict_cache.budget=256"])
    made = gw.optimize(DEMO, recipe, target=TARGET, cost=True)
    assert made.report is not None and made.report.cost is not None
    assert made.report.cost.divergence > 1e-4 and made.report.cost.error > 0


def test_prompts_that_run_otherwise_are_read_before_what_is_measured() -> None:
    """All tokens but a prompt's run through the whole model here."""
    text = "def area(width, height):\n    return width * height\n" * 12
    options = ["predict_cache.windows=2", "predict_cache.length=256", "predict_cache.layers=0.5"]
    recipe = gw.Recipe.load("kv_prediction").with_options(options)
    made = gw.optimize(DEMO, recipe, target=TARGET, data=[SAMPLE.read_text()], cost=[text])
    assert made.report is not None and made.report.cost is not None
    assert made.report.cost.divergence > 1e-3 and made.report.cost.ratio > 1


def test_what_is_not_approximate_costs_nothing() -> None:
    made = gw.optimize(DEMO, "copyspec", target=TARGET, cost=True)
    assert made.report is not None and made.report.cost is None


def test_a_text_that_is_not_there_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    traced: list[str] = []
    with pytest.raises(gw.GraftworkError, match=r"there is no .*missing"):
        gw.optimize(DEMO, "int8", cost=tmp_path / "missing", progress=traced.append)
    assert traced == []
    with pytest.raises(gw.GraftworkError, match="1 tokens has nothing to predict"):
        gw.optimize(DEMO, "int8", target=TARGET, cost=[[5]])


def test_nobody_is_kept_waiting_for_what_cannot_be(
    plain: gw.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not(plain) == ""
    monkeypatch.setattr(costs, "available", lambda: 1000)
    assert "and 0.0 MB are free" in why_not(plain)
    bare = gw.Model(plain.program.replace(assets={}), plain.target, plain.recipe)
    assert "with its tokenizer" in why_not(bare)
