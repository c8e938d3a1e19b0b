"""Choosing a tree: what is measured through the runtime, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tiny import cached_llama

import graftwork.measuring.tuning as tuning
from graftwork.backends import Target
from graftwork.ir import InputError
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import DraftRecord, StaticTree
from graftwork.ir.plan.shapes import expected
from graftwork.measuring.tuning import evaluate, tune, with_tree
from graftwork.model import Model
from graftwork.recipe import Recipe
from graftwork.runtime.speculate.level import Level
from graftwork.runtime.speculate.proposers.base import PROPOSERS, Proposer


@dataclass(frozen=True)
class OracleDraft(DraftRecord):
    """Knows what comes: at level d it ranks the true token at `d % 3`."""

    levels: int = 4
    kind: ClassVar[str] = "oracle"


TRUTH: dict[tuple[int, ...], list[int]] = {}


@PROPOSERS.register(OracleDraft)
class OracleProposer(Proposer):
    """Reads the continuation of each prompt from `TRUTH`."""

    def begin(self, prompts):
        (self.text,) = [list(prompt) for prompt in prompts]
        self.truth = TRUTH[tuple(self.text)]

    def observe(self, taken):
        self.text += taken.tokens[0]

    def root(self, count):
        self.level = 0
        return self._level(1, count)

    def grow(self, tokens, parents, count):
        self.level += 1
        return self._level(tokens.shape[1], count)

    def _level(self, width, count):
        place = len(self.text) + self.level
        token = self.truth[place] if place < len(self.truth) else 0
        others = [(token + 1 + rank) % 32 for rank in range(count)]
        others.insert(self.level % 3, token)
        row = np.array(others[:count])
        tokens = np.broadcast_to(row, (1, width, count)).copy()
        return Level(tokens, -np.arange(count, dtype=np.float32) * np.ones(tokens.shape, "f4"))


class Timed(Planned):
    """An executable on which time passes only in steps: 1 ms, and `slope` more a column."""

    def __init__(self, executable, slope):
        super().__init__(executable, executable.program.plan)
        self.now, self.slope = 0.0, slope

    def run(self, function, inputs, fetch):
        self.now += 1e-3 * (1 + self.slope * (inputs["tokens"].shape[1] - 1))
        return self.executable.run(function, inputs, fetch)

    def hold(self, function, inputs, fetch):
        return lambda: self.run(function, inputs, fetch)


PROMPTS = [[3, 5, 7, 11], [2, 4, 6, 8, 10]]


@pytest.fixture(scope="module")
def model():
    program = cached_llama(trees=True)
    recipe = {"name": "oracle", "title": "Oracle", "extends": "baseline", "passes": ["dce"]}
    target = Target.parse("eager:cpu:float32")
    plain = Model(program, target, Recipe.load(recipe).as_dict())
    for prompt in PROMPTS:
        ids = plain.generate(torch.tensor([prompt]), max_new_tokens=40, eos_token_id=None)
        TRUTH[tuple(prompt)] = ids[0].tolist()
    plan = replace(program.plan, draft=OracleDraft())
    return replace(plain, program=program.replace(plan=plan))


@pytest.fixture
def timed(model, monkeypatch):
    def make(slope, **more):
        executable = Timed(tuning._with_tree(model), slope)
        monkeypatch.setattr(tuning, "_with_tree", lambda model: executable)
        options = {"data": PROMPTS, "tokens": 24, "depth": 6, "ranks": 4, **more}
        return tune(model, **options, widths=(1, 2, 4, 8, 16), clock=lambda: executable.now)

    return make


def test_rates_are_those_of_the_ranks_that_were_right(timed):
    """The drafter is always right: at rank 0, 1, 2 and 0 of its four levels."""
    tuned = timed(0.1)
    right = (0, 1, 2, 0)
    assert tuned.rates == tuple(tuple(float(r == rank) for r in range(4)) for rank in right)
    assert tuned.drafting == 0.0
    wanted = {width: 1e-3 * (1 + 0.1 * (width - 1)) for width in (1, 2, 4, 8, 16)}
    assert tuned.seconds == pytest.approx(wanted)


def test_the_fastest_tree_is_chosen_and_the_recipe_draws_it(timed, tmp_path):
    tuned = timed(0.1)
    assert tuned.best.tree == StaticTree.of([(0,), (0, 1), (0, 1, 2), (0, 1, 2, 0)])
    assert tuned.best.tokens == 5.0
    assert tuned.best.speed == pytest.approx(5.0 / 1.4e-3)
    assert [choice.nodes for choice in tuned.choices] == [0, 1, 3]
    loaded = Recipe.load(tuned.save(tmp_path / "tuned.yaml"))
    options = {use.name: use.options for use in loaded.passes}
    assert options["tree_static"] == {"paths": [[0], [0, 1], [0, 1, 2], [0, 1, 2, 0]]}
    assert "accept_trees" in options and loaded.contract == "lossless"
    assert "4 nodes" in shown(tuned) and "3.57 times" in shown(tuned)


def test_a_tree_of_a_given_size(timed):
    tuned = timed(2.0, nodes=3)
    assert tuned.best.tree == StaticTree.of([(0,), (0, 1), (0, 1, 2)])
    for nodes in (0, 16):
        with pytest.raises(InputError, match=rf"nodes={nodes}: expected 1 to 15"):
            timed(2.0, nodes=nodes)


def test_where_columns_are_dear_drafting_does_not_pay(timed):
    tuned = timed(2.0)
    assert tuned.best.speed < tuned.choices[0].speed
    assert "does not pay" in shown(tuned)


def shown(tuned):
    """The table as text."""
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(tuned.table())
    return capture.get()


RATES = [[0.6, 0.2], [0.5, 0.2], [0.4, 0.2]]


def test_evaluate_is_the_best_tree_of_each_size():
    seconds = {1: 1.0, 8: 1.0, 16: 1.0}
    for nodes, choice in enumerate(evaluate(RATES, seconds, 0.0)[1:], 1):
        assert choice.tree.most <= nodes
        assert choice.tokens == pytest.approx(expected(StaticTree.best(RATES, nodes).paths, RATES))


def test_best_tree_takes_ranks_by_their_rate_and_none_that_is_never_right():
    rates = [[0.1, 0.6, 0.0], [0.5, 0.0, 0.2]]
    assert StaticTree.best(rates, 3).paths == ((1,), (1, 0), (1, 2))
    assert StaticTree.best(rates, 99).most == 6


def test_dear_levels_make_trees_shallow():
    seconds = {1: 1.0, 16: 1.2}
    depths = [
        max(evaluate(RATES, seconds, drafting), key=lambda choice: choice.speed).tree.depth
        for drafting in (0.0, 0.15, 0.45)
    ]
    assert depths == sorted(depths, reverse=True) and depths[0] == 3 and depths[-1] == 1


def test_a_recipe_s_own_tree_makes_room():
    recipe = Recipe.load("recycling")
    tuned = with_tree(recipe, StaticTree.of([(0,)]), "eager:cpu:float32")
    names = [use.name for use in tuned.passes]
    assert names.count("tree_static") == 1 and names.count("accept_trees") == 1
    assert tuned.steps[-1].pass_.paths == ((0,),)


def test_drafters_without_predictions_are_refused(model):
    from graftwork.passes.drafting.suffix import SuffixDraft

    plan = replace(model.program.plan, draft=SuffixDraft())
    copying = replace(model, program=model.program.replace(plan=plan))
    with pytest.raises(InputError, match="does not draw a tree from predictions"):
        tune(copying, data=PROMPTS)
    with pytest.raises(InputError, match="without a recipe"):
        tune(copying, "medusa", data=PROMPTS)
