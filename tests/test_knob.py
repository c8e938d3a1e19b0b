"""Options that a text decides: the most that it allows, or a refusal and what the least costs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_llama

import graftwork as gw
from graftwork.cli.demo import demo_folder
from graftwork.data import knob as knobs
from graftwork.data.corpus import SAMPLE
from graftwork.ir import InputError, PassError, Weight, WeightStore
from graftwork.passes.depth.skip_layers import SkipLayers
from graftwork.passes.engine.evidence import Evidence, WorkFolder
from graftwork.recipe import Knob, Recipe
from graftwork.report import Cost
from graftwork.tracing import kept_programs

DEMO = str(demo_folder())
TARGET = "eager:cpu:float32"
SPEEDUPS = [2.0, 1.6, 1.3, 1.15]
RECIPE = {
    "name": "spread",
    "extends": "unified_skipping",
    "knob": {"skip_layers.speedup": SPEEDUPS},
}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "pace_of", lambda made, plain, rounds=3: 1.5)


def speedup(model: gw.Model) -> float:
    (use,) = (use for use in model.recipe["passes"] if use["pass"] == "skip_layers")
    found: float = use["options"]["speedup"]
    return found


def tried(recipe: object, **options: object) -> tuple[gw.Model, list[str]]:
    """What was made, and the values that were tried."""
    stages: list[str] = []
    made = gw.optimize(DEMO, recipe, target=TARGET, progress=stages.append, **options)  # type: ignore[arg-type]
    return made, [stage.rpartition("=")[2] for stage in stages if stage.startswith("try ")]


def test_a_text_takes_the_most_that_it_tolerates_and_the_choice_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_programs, "_is_patched", lambda: False)
    cost = {}
    for value in SPEEDUPS:
        made = gw.optimize(DEMO, Recipe.load(RECIPE).turned(value), target=TARGET, cost=True)
        assert made.report is not None and made.report.cost is not None
        cost[value] = made.report.cost.ratio
    assert sorted(cost.values(), reverse=True) == list(cost.values())  # or no bisection finds it
    between = (cost[1.6] + cost[1.3]) / 2 - 1
    made, values = tried(RECIPE, tolerance=between)
    assert speedup(made) == 1.3 and 1 < len(values) < len(SPEEDUPS)
    assert made.report is not None and made.report.cost is not None
    assert made.report.cost.speed == 1.5 and made.report.cost.ratio <= 1 + between
    assert any("skip_layers.speedup=1.3" in note for note in made.report.notes)
    again, values = tried(RECIPE, tolerance=between)
    assert speedup(again) == 1.3 and values == []
    assert again.report is not None
    assert (again.report.cost, again.report.notes) == (made.report.cost, made.report.notes)
    assert speedup(tried(RECIPE, tolerance=90.0)[0]) == 2.0


def test_a_refusal_is_kept_like_a_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAFTWORK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_programs, "_is_patched", lambda: False)
    cost = Cost(text="a text", tokens=9, divergence=1.0, ratio=1.2, error=0.01, agreement=0.5)
    asked: list[float] = []

    def told(made: gw.Model, *given: object, **options: object) -> Cost:
        asked.append(speedup(made))
        return cost

    monkeypatch.setattr(knobs, "cost_of", told)
    recipe = {**RECIPE, "knob": {"skip_layers.speedup": SPEEDUPS[2:]}}
    with pytest.raises(InputError, match=r"1\.1 is tolerated") as first:
        tried(recipe, tolerance=0.1)
    assert asked and "measured before" not in str(first.value)
    asked.clear()
    with pytest.raises(InputError, match="measured before and is kept") as again:
        tried(recipe, tolerance=0.1)
    assert not asked and str(again.value).startswith(str(first.value))
    # Other figures, other questions: nothing is taken for what it is not.
    with pytest.raises(InputError, match=r"1\.15 is tolerated"):
        tried(recipe, tolerance=0.15)
    assert asked and speedup(tried(recipe, tolerance=0.3)[0]) == SPEEDUPS[2]
    # What is too slow is kept as well, and forgotten where the message says.
    monkeypatch.setattr(knobs, "pace_of", lambda made, plain, rounds=3: 0.8)
    for words in ("makes this model slower", "measured before"):
        with pytest.raises(InputError, match=words) as slow:
            tried(recipe, tolerance=0.25)
    folder = Path(str(slow.value).rpartition("delete ")[2])
    assert folder == tmp_path / "cache" / kept_programs.CHOICES and any(folder.iterdir())
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="makes this model slower") as slow:
        tried(recipe, tolerance=0.25)
    assert "measured before" not in str(slow.value)
    # A damaged file counts as missing.
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    with pytest.raises(InputError, match="makes this model slower") as slow:
        tried(recipe, tolerance=0.25)
    assert "measured before" not in str(slow.value)


@pytest.mark.long
def test_where_even_the_least_costs_too_much_the_recipe_refuses_and_says_how_much() -> None:
    with pytest.raises(InputError, match=r"speedup=1.15, the least .* of the model's perplexity"):
        tried(RECIPE, tolerance=1e-6)
    # The user's own text decides where one is given.
    with pytest.raises(InputError, match="on the given text"):
        tried(RECIPE, tolerance=1e-6, data=[SAMPLE.read_text()[3000:]])


def test_who_sets_the_option_has_decided() -> None:
    recipe = Recipe.load(RECIPE).with_options(["skip_layers.speedup=1.3"])
    assert recipe.knob is None and tried(recipe)[1] == []
    own = {"extends": "calm", "passes": [{"depth_confident": {"threshold": 0.5}}]}
    assert Recipe.load(own).knob is None
    other = {"extends": "calm", "passes": [{"depth_confident": {"tokens": 9}}]}
    assert Recipe.load(other).knob == Recipe.load("calm").knob is not None
    assert Recipe.load(Recipe.load("calm").as_dict()).knob == Recipe.load("calm").knob
    # Layers that are named leave a number of layers nothing to say.
    named = {"extends": "skip_layers", "passes": [{"skip_layers": {"layers": [1]}}]}
    said = Recipe.load("skip_layers").with_options(["skip_layers.layers=[1]"])
    assert Recipe.load(named).knob is None and said.knob is None
    assert Recipe.load("skip_layers").with_options(["skip_layers.windows=2"]).knob is not None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"skip_layers.speedup": []}, "expected a list of values"),
        ({"skip_layers.speedup": 2.0}, "expected a list of values"),
        (["skip_layers.speedup"], r"expected pass.option: \[values\]"),
        ({"skip_layers.speed": [2.0]}, "has no option 'speed'"),
        ({"skip_layer.speedup": [2.0]}, "has no pass 'skip_layer'"),
        ({"skip_layers.speedup": [2.0, 0.5]}, "greater than 1"),
    ],
)
def test_a_knob_that_is_none_is_refused(said: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe.load({**RECIPE, "knob": said})


def test_what_cannot_be_measured_stands_as_the_recipe_has_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
        num_attention_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    made = gw.optimize(model, RECIPE, target=TARGET)
    assert made.report is not None and "was not measured" in str(made.report)
    assert speedup(made) == 2.0


@pytest.mark.long
def test_tolerances_and_slow_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="recipe 'int8' has no knob"):
        gw.optimize(DEMO, "int8", tolerance=0.1)
    for wrong in (0.0, -1.0, float("nan"), True):
        with pytest.raises(InputError, match="expected a share above 0"):
            gw.optimize(DEMO, RECIPE, tolerance=wrong)
    monkeypatch.setattr(knobs, "pace_of", lambda made, plain, rounds=3: 0.8)
    with pytest.raises(InputError, match=r"at 0.80 times the model's own speed .* strict=True"):
        gw.optimize(DEMO, "copyspec", target=TARGET, strict=True)


def test_what_saves_no_time_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that says so once may be noise; who sets the option has decided."""
    recipe = {**RECIPE, "knob": {"skip_layers.speedup": SPEEDUPS[2:]}}
    cost = Cost(text="a text", tokens=9, divergence=1.0, ratio=1.2, error=0.01, agreement=0.5)
    dear = cost.model_copy(update={"ratio": 7.0})

    def told(made: gw.Model, *given: object, **options: object) -> Cost:
        return dear if speedup(made) == SPEEDUPS[2] else cost

    monkeypatch.setattr(knobs, "cost_of", told)
    paces = {3: 0.7, 6: 0.8}
    monkeypatch.setattr(knobs, "pace_of", lambda made, plain, rounds=3: paces[rounds])
    with pytest.raises(InputError, match="makes this model slower") as told_slow:
        tried(recipe, tolerance=0.3)
    said = str(told_slow.value)
    assert "skip_layers.speedup=1.15" in said and "at 0.80 times" in said
    assert "speedup=1.3 already has 7.000" in said and "tolerance=6.01" in said
    with pytest.raises(InputError, match="no value of it costs this text more"):
        tried(recipe, tolerance=90.0)
    with pytest.raises(InputError, match=r"speedup=1.15, the least .* 1.200 .* 1.1 is tolerated"):
        tried(recipe, tolerance=0.1)
    with pytest.raises(InputError, match=r"9 tokens are too few to decide on .* give 256 at least"):
        tried(recipe, data=[[1] * 9])
    paces[6] = 1.01
    made, _ = tried(recipe, tolerance=0.3)
    assert made.report is not None and made.report.cost is not None
    assert made.report.cost.speed == 1.01
    assert speedup(tried(Recipe.load(recipe).turned(1.3))[0]) == 1.3


def test_maps_are_judged_on_a_text_that_they_were_not_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where prompts alone run otherwise, it is their speed that counts."""
    asked: list[object] = []
    good = Cost(
        text="a text", tokens=9, divergence=0.1, ratio=1.2, error=0.0, agreement=0.5, prompts=True
    )

    def told(made: gw.Model, plain: gw.Model, text: object, **options: object) -> Cost:
        asked.append(text)
        return good

    monkeypatch.setattr(knobs, "cost_of", told)
    options = ["predict_cache.windows=2", "predict_cache.length=256"]
    recipe = Recipe.load("kv_prediction").with_options(options)
    recipe = replace(recipe, knob=Knob("predict_cache.layers", (0.5,)))
    data = [SAMPLE.read_text()]
    with pytest.raises(InputError, match=r"layers=0.5, the least .* 1.05 is tolerated"):
        tried(recipe, data=data)
    assert asked == [None]
    assert "reads prompts at 1.50 times" in str(good.model_copy(update={"speed": 1.5}))
    monkeypatch.setattr(knobs, "pace_of", lambda made, plain, rounds=3: 0.8)
    with pytest.raises(InputError, match=r"reads prompts at 0.80 times the model's own speed"):
        tried(recipe, data=data, tolerance=0.3)


def test_a_pace_is_that_of_prompts_where_they_alone_run_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()

    class Fake:
        def __init__(self, reading: float, ahead: str) -> None:
            info = SimpleNamespace(vocab_size=9, context=4096)
            plan = SimpleNamespace(step=SimpleNamespace(ahead=ahead))
            self.program = SimpleNamespace(info=info, assets={}, plan=plan)
            self.reading, self.asked = reading, set[tuple[int, int]]()

        def forget(self) -> None: ...

        def generate(self, ids: list[list[int]], *, max_new_tokens: int, **rest: object) -> object:
            self.asked.add((len(ids[0]), max_new_tokens))
            stats = SimpleNamespace(prefill_seconds=self.reading, tokens_per_second=7.0)
            return SimpleNamespace(stats=stats)

    plain = Fake(1.0, "")
    assert knobs.pace_of(Fake(0.5, "predict"), plain) == 2.0  # type: ignore[arg-type]
    assert plain.asked == {(knobs.READING, 1)}
    assert knobs.pace_of(Fake(0.5, ""), plain) == 1.0  # type: ignore[arg-type]


@pytest.mark.long
def test_a_pace_is_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    made, plain = (gw.optimize(DEMO, recipe, target=TARGET) for recipe in ("int8", "baseline"))
    assert 0.02 < knobs.pace_of(made, plain) < 50


def test_the_layers_that_a_text_misses_least_are_left_out(tmp_path: Path) -> None:
    """Layers 1 and 3 of six change nothing, so those are the ones."""
    program = tiny_llama(6)
    nothing = {f"layers.{layer}.{part}" for layer in (1, 3) for part in ("o", "down")}
    weights = {
        name: Weight.of(name, torch.zeros_like(old.load())) if name in nothing else old
        for name, old in program.weights.items()
    }
    program = program.replace(weights=WeightStore(weights))
    ids = torch.randint(0, program.info.vocab_size, (600,))
    evidence = Evidence(ids, WorkFolder(tmp_path / "work"))
    two = SkipLayers(count=2, length=16)
    assert two.learn(program, evidence).program.step.weights == (
        SkipLayers(layers=(1, 3)).run(program).program.step.weights
    )
    with pytest.raises(PassError, match="leaves none of 6 layers"):
        SkipLayers(count=6, length=16).learn(program, evidence)
    with pytest.raises(PassError, match="needs text"):
        two.apply(program)
    assert SkipLayers(count=2, layers=(0,)).text is None  # named layers are the ones


def test_budgets_of_layers_may_be_shares() -> None:
    recipe = Recipe.load("skipdecode").with_options(["depth_linear.least=0.5"])
    made = gw.optimize(DEMO, replace(recipe, knob=None), target=TARGET)
    record = made.program.plan.depth
    assert [record.layers(place, 8) for place in (0, 128, 256, 999)] == [8, 6, 4, 4]  # type: ignore[attr-defined]
