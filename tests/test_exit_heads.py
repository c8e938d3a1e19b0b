"""Heads at exits: they start as the target's own, learn what the whole model says, and decide."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exits import acting
from test_training import TEXT
from tiny import PROMPTS, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import GraftworkWarning, Program
from graftwork.ir.execution.executable import Executable, Planned
from graftwork.model import Model
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.scoring import score
from graftwork.training import Fitted, fit

EAGER = Target("eager", "cpu")
ALONE = PROMPTS[2:3]
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}


def model(recipe: str, *settings: str) -> Model:
    cuts = () if recipe == "baseline" else ("cut_depth.every=1",)
    chosen = Recipe.load(recipe).with_options([*cuts, *settings])
    program, _ = run_passes(tiny_llama(4), chosen.steps)
    return Model(program, EAGER, chosen.as_dict())


@cache
def trained(folder: Path) -> Fitted:
    options = {"steps": 120, "batch": 6, "window": 24, "own": 0.0, "rate": 1e-2}
    return fit(model("self_supervised_exits"), TEXT, out=folder / "heads", **options)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fitted, Path]:
    folder = tmp_path_factory.mktemp("exits")
    return trained(folder), folder / "heads"


def at(executable: Executable, threshold: float) -> Any:
    """An executable whose tokens leave above another threshold."""
    plan = executable.program.plan
    depth = dataclasses.replace(plan.depth, threshold=threshold)  # type: ignore[type-var]
    return Planned(executable, dataclasses.replace(plan, depth=depth))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_untrained_heads_say_what_the_targets_own_says(backend: str) -> None:
    texts = []
    for recipe, *settings in (
        ("calm", "depth_confident.measure=margin"),
        ("self_supervised_exits",),
    ):
        executable = compile(acting(model(recipe, *settings).program), Target(backend, "cpu"))
        made = generate(at(executable, 0.05), ALONE, return_dict_in_generate=True, **ASKED)
        assert made.stats.layers < 4
        texts.append((made.sequences.tolist(), made.stats.layers))
    assert texts[0] == texts[1]


def test_heads_learn_what_the_whole_model_says(fitted: tuple[Fitted, Path]) -> None:
    made, folder = fitted
    before = hits(model("self_supervised_exits").program)
    after = hits(made.model.program)
    assert all(b > a for a, b in zip(before, after, strict=True)), (before, after)
    assert sum(after) > sum(before) + 0.3
    depth: Any = made.model.program.plan.depth
    assert depth.trained and made.own_text is not None
    # The target is as it was, and the file holds the heads alone.
    for name, weight in model("self_supervised_exits").program.weights.items():
        if not name.startswith("exits."):
            assert torch.equal(weight.load(), made.model.program.weights[name].load())
    again = model("self_supervised_exits", f"depth_heads.weights={folder}")
    assert hits(again.program) == after


def hits(program: Program) -> list[float]:
    """How often the head at each exit says what the whole model says, on text kept apart."""
    executable, found = compile(program, EAGER), []
    tokens = torch.tensor(TEXT[9][:24])[None]
    executable.begin(1, 32)
    places = torch.arange(24)[None]
    given = {"tokens": tokens, "positions": places, "past": torch.tensor([0]), "select": places}
    plan: Any = program.plan
    parts, heads = plan.step.parts[:-1], (*plan.depth.heads, plan.step.head)
    best = []
    for part, head in zip(parts, heads, strict=True):
        for name, fetch in ((part, ()), (head, ("logits",))):
            fn = program.function(name)
            wanted = {key: value for key, value in given.items() if fn.has_input(key)}
            made = executable.run(name, wanted, fetch)
        best.append(made["logits"].argmax(-1).clone())
    found = [float((early == best[-1]).float().mean()) for early in best[:-1]]
    return found


@pytest.mark.parametrize("recipe", ["self_supervised_exits", "mixture_of_depths"])
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_what_nobody_trained_runs_all_layers_and_says_so(recipe: str, backend: str) -> None:
    made = compile(at_any(model(recipe).program), Target(backend, "cpu"))
    plain = compile(model("baseline").program, Target(backend, "cpu"))
    with pytest.warns(GraftworkWarning, match="is untrained.* run through all layers"):
        found = generate(made, ALONE, return_dict_in_generate=True, **ASKED)
    assert torch.equal(found.sequences, generate(plain, ALONE, **ASKED))
    assert found.stats.layers == found.stats.target_layers == 4
    ids = found.sequences
    torch.testing.assert_close(score(made, ids, 1), score(plain, ids, 1), atol=1e-4, rtol=1e-3)
    acted = Planned(made, acting(made.program).plan)
    assert generate(acted, ALONE, return_dict_in_generate=True, **ASKED).stats.layers < 4


def at_any(program: Program) -> Program:
    """A program whose exits are sure of anything, and whose routers of nothing."""
    depth: Any = program.plan.depth
    changed = dataclasses.replace(depth, threshold=0.001 if depth.kind == "heads" else 0.999)
    return program.replace(plan=dataclasses.replace(program.plan, depth=changed))
