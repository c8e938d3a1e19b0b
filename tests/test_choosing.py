"""The recipe `auto`: what is chosen, why, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import graftwork as gw
from graftwork import choosing
from graftwork.choosing import AUTO, joined, prompts_of
from graftwork.cli.demo import demo_folder
from graftwork.cli.open_model import with_settings
from graftwork.ir import InputError
from graftwork.recipe import Recipe
from graftwork.report import Cost

SPEEDS = {"int8": 1.5, "int4": 1.8, "copyspec": 0.9, "recycling": 1.1}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., gw.Model]:
    """Chooses with these speeds and perplexities instead of those of this machine."""

    def run(speeds: dict[str, float], ratios: dict[str, float], **how: Any) -> gw.Model:
        def pace(made: gw.Model, other: gw.Model, prompts: Any) -> float:
            return speeds.get(made.recipe["name"].partition("+")[0], 1.0)

        def cost_of(made: gw.Model, plain: gw.Model, text: Any, sample: Any) -> Cost:
            ratio = ratios.get(made.recipe["name"], 1.0)
            figures = {"tokens": 100, "divergence": 0.0, "error": 0.001, "agreement": 1.0}
            return Cost(text="a text", ratio=ratio, **figures)

        monkeypatch.setattr(choosing, "pace", pace)
        monkeypatch.setattr(choosing, "cost_of", cost_of)
        return gw.optimize(demo_folder(), AUTO, target="eager", **how)

    return run


def test_the_fastest_weights_then_the_fastest_drafts(measured: Any) -> None:
    made = measured(SPEEDS, {})
    assert made.recipe["name"] == made.report.recipe == "recycling+int4"
    (note,) = made.report.notes
    assert "recycling+int4: 1.98 times" in note and "then came int4 1.80, " in note
    assert made.report.cost.speed == pytest.approx(1.98)
    assert {"quantize_weights", "draft_recycling"} <= {use["pass"] for use in made.recipe["passes"]}


def test_weights_that_cost_too_much_are_not_taken(measured: Any) -> None:
    made = measured(SPEEDS, {"int4": 1.04}, tolerance=0.04)
    assert made.recipe["name"] == "recycling+int8"
    assert "int4 has 1.040 +- 0.001" in made.report.notes[1] and "1.04 is" in made.report.notes[1]


def test_drafts_that_gain_less_than_noise_are_left_out(measured: Any) -> None:
    made = measured({**SPEEDS, "recycling": 1.015}, {})
    assert made.recipe["name"] == "int4"
    assert measured({}, {}).recipe["name"] == "baseline"


def test_nothing_is_begun_after_the_minutes(measured: Any) -> None:
    made = measured(SPEEDS, {}, minutes=1e-9)
    assert made.recipe["name"] == "baseline"
    assert sum("was not tried" in note for note in made.report.notes) == 6


def test_what_is_no_number_is_refused_before_the_slow_part() -> None:
    for how in ({"tolerance": 0}, {"tolerance": True}, {"minutes": -1}, {"minutes": float("nan")}):
        with pytest.raises(InputError, match=f"{next(iter(how))}="):
            gw.optimize("no such folder", AUTO, **how)
    with pytest.raises(InputError, match="only the recipe 'auto'"):
        gw.optimize("no such folder", "int8", minutes=3)
    for asked in ("validate", "strict", "cost"):
        with pytest.raises(
            InputError, match=f"measures speed and quality itself.*leave out {asked}"
        ):
            gw.optimize("no such folder", AUTO, **{asked: True})


def test_other_commands_take_what_it_chose() -> None:
    with pytest.raises(InputError, match="optimize MODEL --recipe auto --out DIR once"):
        with_settings(AUTO, ["draft_suffix.tokens=3"])


def test_prompts_are_beginnings_of_texts_among_all_of_them() -> None:
    assert prompts_of([list(range(10)), [7]], 4096) == [[0, 1, 2, 3, 4]]
    assert prompts_of([[7]], 4096) == [[7]]
    many = prompts_of([[n] * 6 for n in range(60)], 4096)
    assert many == [[n] * 3 for n in range(0, 60, 10)]
    parts = prompts_of([list(range(3000))], 4096)
    assert [part[0] for part in parts] == [512 * n for n in range(6)]
    assert [len(part) for part in parts] == [256] * 5 + [220]
    assert [len(part) for part in prompts_of([list(range(90))], 40)] == [20, 20, 5]


def test_joined_passes_say_both() -> None:
    both = joined(Recipe.load("copyspec"), Recipe.load("int8"))
    assert both.contract == "approximate" and both.name == "copyspec+int8"
    assert joined(Recipe.load("copyspec"), Recipe.load("baseline")) == Recipe.load("copyspec")


@pytest.mark.measured
def test_what_is_chosen_runs(tmp_path: Any) -> None:
    made = gw.optimize(demo_folder(), AUTO, target="onnxruntime", minutes=0.2)
    asked: Any = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": []}
    text = made.generate([[5, 6, 7]], **asked)
    made.save(tmp_path / "chosen")
    again = gw.load(tmp_path / "chosen", target="onnxruntime")
    assert again.generate([[5, 6, 7]], **asked).equal(text)
    assert made.report is not None and "auto took" in made.report.notes[0]
