"""The benchmark of depth: texts go on as they are, whatever the method says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime.scoring import score

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def curves() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        import depth_curves
    finally:
        sys.path.remove(str(FOLDER))
    return depth_curves


def compiled(name: str, *settings: str) -> Any:
    program = run_passes(tiny_llama(4), Recipe.load(name).with_options(list(settings)).steps)[0]
    return compile(program, Target("eager", "cpu"))


WINDOW = torch.randint(1, 32, (24,), generator=torch.Generator().manual_seed(0)).tolist()


def test_a_window_is_read_as_it_is(curves: Any) -> None:
    """The whole model's nats are those of scoring the text at once."""
    nats, best, layers = curves.read(compiled("baseline"), WINDOW, 8)
    logits = score(compiled("baseline"), torch.tensor([WINDOW]))[0]
    wanted = -logits.log_softmax(-1)[torch.arange(23), torch.tensor(WINDOW[1:])][7:]
    assert torch.allclose(torch.tensor(nats), wanted, atol=1e-4)
    assert best == logits.argmax(-1)[7:-1].tolist() and layers == 4


def test_layers_that_are_left_out_cost_nats_and_count(curves: Any) -> None:
    nats, _, layers = curves.read(compiled("d3", "depth_decay.alpha=0.9"), WINDOW, 8)
    whole, _, _ = curves.read(compiled("baseline"), WINDOW, 8)
    # The prompt's own step runs through all layers.
    assert nats[0] == pytest.approx(whole[0], abs=1e-5) and nats[4:] != pytest.approx(whole[4:])
    assert 2 < layers < 4


def test_every_method_is_a_recipe_with_its_knob(curves: Any) -> None:
    for name, (recipe, knob, values) in curves.METHODS.items():
        for value in (values[0], values[-1]):
            Recipe.load(recipe).with_options([f"{knob}={value}", *curves.MORE.get(name, ())])
