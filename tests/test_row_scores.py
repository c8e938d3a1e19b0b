"""A rule by which a cache loses rows is a file and a recipe: here is one that a package brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from test_installed import forget, install
from tiny import PROMPTS, tiny_llama

import graftwork as gw
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program
from graftwork.ir import run as run_program
from graftwork.model import Model
from graftwork.passes import all_passes
from graftwork.passes.caching.scores.base import SCORES, rounded_log, row_score
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe

POINTS = "[graftwork.passes]\nx = {name}\n[graftwork.recipes]\nx = {name}.recipes\n"
RULE = '''
"""Rows with long values."""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from graftwork.passes.caching.scores.base import row_score, rounded_log


@row_score(sinks=1)
def long_values(values: Tensor, *, power: Annotated[float, Field(gt=0, le=4)] = 1.0) -> Tensor:
    """The logarithm of a value's length, to a power."""
    return rounded_log(values.float().pow(2).sum(-1).sqrt().pow(power))
'''
RECIPE = """
title: The rows of the cache with the longest values are kept
contract: approximate
extends: baseline
passes: [evict_cache: {method: long_values, budget: 8, block: 4, tuning: {power: 2.0}}]
"""
ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}


@pytest.fixture(autouse=True)
def brought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the rule is installed."""
    all_passes()
    known = dict(SCORES.entries)
    files = {"long_values.py": RULE, "recipes/__init__.py": "", "recipes/long_values.yaml": RECIPE}
    install(tmp_path, tmp_path.name, POINTS.format(name=tmp_path.name), files)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    monkeypatch.undo()
    forget()
    SCORES.entries.clear()
    SCORES.entries.update(known)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_rule_is_a_file_and_a_recipe(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps what its meaning says, and a saved model needs it no more."""
    recipe, target = Recipe.load("long_values"), Target(backend, threads=1)
    model = Model(run_passes(tiny_llama(), recipe.steps)[0], target, recipe.as_dict())
    prompt = PROMPTS[:1]
    wanted = model.generate(prompt, **ASKED)
    assert kept_of(model.program) == [0, 2, 4, 7, 8, 9, 10, 11]
    model.save(tmp_path / "saved")
    monkeypatch.undo()
    forget()
    SCORES.entries.pop("long_values")
    assert torch.equal(gw.load(tmp_path / "saved").generate(prompt, **ASKED), wanted)


def test_the_guide_has_this_rule() -> None:
    guide = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    assert indent(RULE[RULE.index("def ") :], "    ") in guide


def test_a_rule_calls_what_torch_decomposes() -> None:
    """Into core ATen, of which programs are made; anything else is refused by name."""

    @row_score(sinks=1)
    def spread(values: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        place = torch.arange(values.shape[2], device=past.device)
        behind = (place >= past[:, None])[:, None]
        return rounded_log(torch.where(behind, torch.zeros_like(values[..., 0]), values.std(-1)))

    @row_score()
    def lowest(keys: torch.Tensor) -> torch.Tensor:
        return rounded_log(torch.sort(keys, stable=True).values[..., 0].abs())

    assert kept_of(evicting("spread")) == [0, 2, 4, 7, 8, 9, 10, 11]
    with pytest.raises(PassError, match=r"lowest calls aten\.sort\.stable, which is not"):
        evicting("lowest")


def evicting(rule: str) -> Program:
    options = {"method": rule, "budget": 8, "block": 4, "tuning": {}}
    recipe = Recipe.load({"extends": "long_values", "passes": [{"evict_cache": options}]})
    return run_passes(tiny_llama(), recipe.steps)[0]


def kept_of(program: Program) -> list[int]:
    """Rows that each head of the first layer keeps of twelve, one value longer than the other."""
    lengths = torch.tensor([1.0, 2, 7, 3, 9, 5, 4, 8, 12, 10, 6, 11])
    sizes = {"B": 1, "C": 12}
    inputs = {"past": torch.tensor([12])}
    for name, state in program.states.items():
        inputs[name] = torch.zeros([sizes.get(str(dim), dim) for dim in state.type.dims])
    inputs["kv.0.value"][..., 0] = -lengths
    kept = run_program(program, "evict", inputs)["kv.0.value"][0, :, :8, 0]
    assert (kept == kept[:1]).all()
    return [lengths.tolist().index(-length) for length in kept[0].tolist()]


def test_its_options_are_checked_where_they_are_written() -> None:
    for options, message in (
        ({"method": "longest"}, "no rule for rows of a cache is called 'longest'; .*long_values"),
        ({"tuning": {"power": 9.0}}, r"tuning: long_values takes power; power: .*less than"),
        ({"tuning": {"width": 9}}, r"tuning: long_values takes power; width"),
        ({"layers": "odd"}, "no rule for budgets of layers is called 'odd'; .* pyramid"),
    ):
        with pytest.raises(InputError, match=message):
            assert Recipe.load(
                {"extends": "long_values", "passes": [{"evict_cache": options}]}
            ).steps


def test_what_lies_behind_the_valid_rows_changes_no_score() -> None:
    """Of all rules that there are: rows behind `past` may hold anything."""
    torch.manual_seed(0)
    past, block, rows = torch.tensor([7, 12]), 4, 12
    given: dict[str, Any] = {
        "keys": torch.randn(2, 2, rows, 8),
        "values": torch.randn(2, 2, rows, 8),
        "sums": torch.rand(2, 2, rows, 1),
        "queries": torch.randn(2, 4, block, 8),
        "opening": torch.randn(2, 4, block, 8),
        "past": past,
        "cos": None,
        "sin": None,
        **{"block": block, "sinks": 1, "recent": 2, "ahead": 8, "interleaved": False},
        **{"scale": 0.35, "attention": {"scale": 0.35}},
    }
    behind = torch.arange(rows) >= past[:, None]
    cut = dict(given)
    for rows_of in ("keys", "values", "sums"):
        cut[rows_of] = given[rows_of].masked_fill(behind[:, None, :, None], 9.0)
    assert {"keydiff", "snapkv", "h2o", "expected"} <= SCORES.entries.keys()
    for name in sorted(SCORES.entries):
        rule = SCORES.find(name)
        found = []
        for tensors in (given, cut):
            numbers = {n: tensors[n] for n in rule.numbers}
            out = rule.function(*(tensors[n] for n in rule.tensors), **numbers)
            found.append(out[0] if isinstance(out, tuple) else out)
        valid = ~behind[:, None].expand_as(found[0])
        assert torch.equal(found[0][valid], found[1][valid]), name
