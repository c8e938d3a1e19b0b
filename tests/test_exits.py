"""Learn then Test: promises hold, the search is honest, what cannot be promised is refused."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from exits import acting
from selection import one_in
from tiny import tiny_llama

from graftwork.backends.target import Target
from graftwork.ir import GraftworkWarning, InputError, Weight, WeightStore
from graftwork.measuring.exit_thresholds import (
    Tried,
    calibrate_exits,
    lacking,
    least_texts,
    lowest,
    p_value,
)
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

PROMPTS = [[(7 * i + 3 * j) % 31 + 1 for j in range(4 + i % 3)] for i in range(48)]


def model(recipe: str = "calm", *settings: str) -> Model:
    by = ("depth_confident.measure=margin",) if recipe == "calm" else ()
    chosen = Recipe.load(recipe).with_options((*by, *settings))
    program, _ = run_passes(tiny_llama(4), chosen.steps)
    return Model(acting(program), Target(threads=1), chosen.as_dict())


def test_p_values_by_hand() -> None:
    # Nothing lacking in any of n texts: Hoeffding's bound is (1 - tolerance)^n.
    assert p_value(0.0, 50, 0.1) == pytest.approx(0.9**50)
    # Bentkus's, e P(Bin(20, 0.5) <= 2), is below Hoeffding's exp(-20 kl(0.1, 0.5)).
    chance = sum(math.comb(20, k) for k in range(3)) / 2**20
    gap = 0.1 * math.log(0.1 / 0.5) + 0.9 * math.log(0.9 / 0.5)
    assert p_value(0.1, 20, 0.5) == pytest.approx(min(math.e * chance, math.exp(-20 * gap)))
    assert p_value(0.1, 1000, 0.1) == p_value(0.4, 1000, 0.1) == 1.0
    values = [p_value(risk / 100, 200, 0.1) for risk in range(12)]
    assert values == sorted(values)
    assert 0.9 ** least_texts(0.1, 0.95) <= 0.05 < 0.9 ** (least_texts(0.1, 0.95) - 1)


def test_a_text_lacks_what_is_not_in_the_other() -> None:
    assert lacking([1, 2, 3], [1, 2, 3]) == 0.0
    assert lacking([1, 2, 3, 4], [4, 5, 6, 7]) == 0.75
    assert lacking([1, 2, 3, 4], [2, 9, 3, 1]) == 0.5
    assert lacking([1, 2], [3]) == 1.0


def test_the_promise_is_broken_no_more_often_than_stated() -> None:
    """Risks of texts at thresholds, of which the true means are known; 400 calibrations."""
    generator = np.random.default_rng(0)
    thresholds = [1 - step / 20 for step in range(21)]
    means = [0.0, *(0.3 * (step / 20) ** 1.5 for step in range(1, 21))]
    tolerance, error, broken, useful = 0.1, 0.1, 0, 0
    for _ in range(400):
        # Two-point risks have the largest variance that a mean allows.
        shared = generator.random(80)
        tried = (
            Tried(
                t, float((shared < mean).mean()), p_value(float((shared < mean).mean()), 80, 0.1), 0
            )
            for t, mean in zip(thresholds, means, strict=True)
        )
        _, found = lowest(tried, error)
        broken += found is not None and means[thresholds.index(found)] > tolerance
        useful += found is not None and found < 1
    assert broken <= 400 * error
    assert useful > 300, "a search that never dares to leave keeps any promise"


def test_the_search_ends_at_the_first_failure() -> None:
    tried = [Tried(1 - i / 10, 0.0, p, 4.0) for i, p in enumerate((0.0, 0.01, 0.2, 0.0))]
    seen, found = lowest(iter(tried), 0.05)
    assert [one.p for one in seen] == [0.0, 0.01, 0.2] and found == 0.9
    assert lowest(iter(tried[2:]), 0.05)[1] is None


@pytest.mark.parametrize("recipe", one_in(2, ["calm", "free", "self_supervised_exits"]))
def test_a_model_is_calibrated_and_keeps_what_was_found(recipe: str, tmp_path: Path) -> None:
    some = PROMPTS[:12]
    found = calibrate_exits(model(recipe), some, tolerance=0.5, confidence=0.8, tokens=5)
    assert found.texts == 9 and found.kept_apart == 3
    assert found.tried[0].risk == 0.0 and found.tried[0].layers == found.total == 4
    assert found.tried[-1].p > 0.2 or found.threshold == 0.0
    assert 0 <= found.held_out.risk <= 1 and found.held_out.layers < 4
    again = Recipe.load(found.save(tmp_path / "found.yaml"))
    made = run_passes(tiny_llama(4), again.steps)[0]
    assert made.plan.depth.threshold == pytest.approx(found.threshold)  # type: ignore[attr-defined]


def sharp(*settings: str) -> Model:
    """Of four layers, of which all but the last are sure of what they say, and wrong."""
    start = tiny_llama(4)
    head = Weight.of("head", start.weights["head"].load() * 40)
    chosen = Recipe.load("calm").with_options(["depth_confident.measure=margin", *settings])
    weights = WeightStore({**start.weights, "head": head})
    program, _ = run_passes(start.replace(weights=weights), chosen.steps)
    return Model(program, Target("eager", "cpu"), chosen.as_dict())


def test_no_promise_is_made_where_no_threshold_keeps_it() -> None:
    """Not even 1, where it falls along the text and tokens leave at 0.9."""
    asked = {"tolerance": 0.1, "confidence": 0.5, "tokens": 12, "held_out": 0.25}
    with pytest.raises(InputError, match=r"even at a threshold of 1 .* decay=50 lets them leave"):
        calibrate_exits(sharp("depth_confident.decay=50"), PROMPTS[:16], **asked)
    found = calibrate_exits(sharp("depth_confident.decay=0"), PROMPTS[:16], **asked)
    assert found.tried[0].risk == 0.0 and found.threshold == 1.0


def test_a_promise_is_about_texts_of_its_length(tmp_path: Path) -> None:
    """Behind it all layers run, with a warning; before it nothing depends on what a call asks."""
    made = model("calm", "depth_confident.decay=4")
    found = calibrate_exits(made, PROMPTS[:12], tolerance=0.9, confidence=0.8, tokens=6)
    assert found.threshold < 0.1 and "6 new tokens" in str(found.table().renderables[1])  # type: ignore[attr-defined]
    chosen = Recipe.load(found.save(tmp_path / "found.yaml"))
    fast = Model(run_passes(tiny_llama(4), chosen.steps)[0], made.target, chosen.as_dict())
    asked = {"eos_token_id": [], "return_dict_in_generate": True}
    with pytest.warns(GraftworkWarning, match=r"texts of 6 new tokens, and 16 may.*--tokens 16\)"):
        long = fast.generate(PROMPTS[:1], max_new_tokens=16, **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = fast.generate(PROMPTS[:1], max_new_tokens=6, **asked)
        few = fast.generate(PROMPTS[:1], max_new_tokens=3, **asked)
    size = len(PROMPTS[0])
    for one in (short, few):
        assert long.sequences[0, : one.sequences.shape[1]].tolist() == one.sequences[0].tolist()
    assert 0 < long.stats.skipped_layers == short.stats.skipped_layers
    scored = fast(long.sequences, prompt=size)
    assert scored[0, size - 1 : -1].argmax(-1).tolist() == long.sequences[0, size:].tolist()


@pytest.mark.parametrize("recipe", ["free", "self_supervised_exits"])
def test_others_keep_to_their_length_too(recipe: str) -> None:
    name = {"free": "depth_deferred"}.get(recipe, "depth_heads")
    fast = model(recipe, f"{name}.threshold=0.001", f"{name}.tokens=6")
    asked = {"eos_token_id": [], "return_dict_in_generate": True}
    skipped = [
        fast.generate(PROMPTS[:1], max_new_tokens=count, **asked).stats.skipped_layers
        for count in (3, 6, 16)
    ]
    assert 0 < skipped[0] < skipped[1] == skipped[2]


def test_promises_that_cannot_be_made_are_refused() -> None:
    chosen = Recipe.load("self_supervised_exits")
    program, _ = run_passes(tiny_llama(4), chosen.steps)
    with pytest.raises(InputError, match="depth=heads is untrained, and nothing leaves early"):
        calibrate_exits(Model(program, Target(), chosen.as_dict()), PROMPTS, tolerance=0.1)
    with pytest.raises(
        InputError, match=r"leave 36 to calibrate on.*needs at least 59.*79 prompts"
    ):
        calibrate_exits(model(), PROMPTS, tolerance=0.05)
    with pytest.raises(InputError, match=r"has no threshold to find.*calm or free"):
        calibrate_exits(model("d3"), PROMPTS, tolerance=0.1)
    for options in ({"tolerance": 0.0}, {"tolerance": 0.1, "confidence": 1.0}):
        with pytest.raises(InputError, match=r"between 0 and 1"):
            calibrate_exits(model(), PROMPTS, **options)
