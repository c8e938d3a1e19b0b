"""What the demo measures. It is not run here: it takes minutes, and speed is not asserted."""

from __future__ import annotations

import pytest
from tiny import tiny_llama

from graftwork.backends.target import Target
from graftwork.cli.demo import RECIPES, SETTINGS, SKIP, TARGETS, demo_folder
from graftwork.measuring.compare import _optimized, recipes_with
from graftwork.tracing import traced


def test_contestants_are_all_pairs_but_those_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "import_model", lambda model, dtype, **_: tiny_llama())
    targets = [Target.parse(target) for target in TARGETS]
    made = _optimized(
        "tiny", recipes_with(RECIPES, SETTINGS), targets, SKIP, None, lambda what: None
    )
    pairs = [(contestant.name, contestant.target) for contestant in made]
    assert set(SKIP) <= {(recipe, target) for recipe in RECIPES for target in TARGETS}
    assert pairs == [(r, t) for t in TARGETS for r in RECIPES if (r, t) not in SKIP]
    assert {name for name, _ in pairs} == set(RECIPES)


def test_the_demo_model_has_prompts() -> None:
    assert (demo_folder() / "prompts.jsonl").is_file()
