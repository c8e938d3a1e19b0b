"""What drafts cost is measured when a model is made, where drafts decide on its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_llama

import graftwork as gw
from graftwork import optimizing
from graftwork.backends.target import Target
from graftwork.cli.demo import demo_folder
from graftwork.data.draft_cost import draft_cost, why_not_timed
from graftwork.ir.plan import EarnedLength
from graftwork.ir.plan.bounds import MOST_NODES
from graftwork.recipe import Recipe
from graftwork.tracing import kept_programs

pytestmark = pytest.mark.measured
DEMO, TARGET = str(demo_folder()), "eager:cpu:float32"
RECIPE = {
    "name": "copies",
    "contract": "approximate",
    "extends": "baseline",
    "passes": [
        {"draft_suffix": {"tokens": 8}},
        "length_earned",
        {"verify_typical": {"share": 0.5}},
    ],
}


def length_of(model: gw.Model) -> EarnedLength:
    length = model.program.plan.length
    assert isinstance(length, EarnedLength)
    return length


def no_timing(executable: Any) -> float:
    raise AssertionError("timed")


def test_what_a_draft_costs_is_measured_once_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_programs, "_is_patched", lambda: False)
    monkeypatch.setattr(optimizing, "draft_cost", lambda executable: 1.3749)
    made = gw.optimize(DEMO, RECIPE, target=TARGET)
    assert length_of(made).worth == length_of(made).least == 1.37
    assert made.report is not None and "takes 1.37 times one without" in made.report.notes[0]
    monkeypatch.setattr(optimizing, "draft_cost", no_timing)
    assert length_of(gw.optimize(DEMO, RECIPE, target=TARGET)) == length_of(made)
    loaded = gw.load(made.save(tmp_path / "artifact"))
    assert length_of(loaded) == length_of(made)
    other = Target.parse(TARGET, threads=7)
    with pytest.raises(AssertionError, match="timed"):  # another machine's, as it were
        gw.optimize(DEMO, RECIPE, target=other)
    own = Recipe.load(RECIPE).with_options(["length_earned.worth=2.5"])
    assert length_of(gw.optimize(DEMO, own, target=other)).worth == 2.5


@pytest.mark.parametrize("found", [0.4, 1e9])
def test_what_cannot_be_is_no_worth(found: float) -> None:
    assert EarnedLength().measured(found).least in (1.0, float(MOST_NODES))  # type: ignore[attr-defined]


def test_where_nothing_is_measured_the_constant_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_programs, "_is_patched", lambda: True)
    monkeypatch.setattr(optimizing, "draft_cost", lambda executable: None)
    made = gw.optimize(DEMO, RECIPE, target=TARGET)
    assert length_of(made).worth is None and length_of(made).least == EarnedLength.ASSUMED
    assert made.report is not None and "too few steps" in made.report.notes[0]
    monkeypatch.setattr(optimizing, "why_not_timed", lambda program, target: "there is no device")
    monkeypatch.setattr(optimizing, "draft_cost", no_timing)
    made = gw.optimize(DEMO, RECIPE, target=TARGET)
    assert length_of(made).worth is None
    assert made.report is not None and "there is no device" in made.report.notes[0]
    short = why_not_timed(tiny_llama(1), Target("eager"))
    assert "context" in short or not short


def test_whole_drafts_are_timed_beside_none() -> None:
    """Steps with drafts have up to nine columns; the model writes as before."""
    recipe = Recipe.load(RECIPE).with_options(["length_earned.worth=1.5"])
    made = gw.optimize(DEMO, recipe, target=TARGET)
    prompt = torch.tensor([[5, 6, 7, 8] * 6])
    asked: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": [], "do_sample": False}
    before = made.generate(prompt, **asked)
    found = draft_cost(made.executable)
    assert found is not None and 0.8 < found < 20
    assert torch.equal(made.generate(prompt, **asked), before)
