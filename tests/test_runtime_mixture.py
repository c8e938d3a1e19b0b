"""Layers with routers: as by hand, the work saved, rows never lacking, and routers that learn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exits import acting
from selection import one_in
from test_training import TEXT
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, Weight
from graftwork.ir.execution.executable import Executable
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.depth.mixture import MixtureDepth
from graftwork.passes.depth.mixture.graph import DepthMixture
from graftwork.passes.depth.mixture.objective import chosen
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.training import fit

ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
EACH, LAYERS = CutDepth(every=1), 6


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(LAYERS), [Step(p) for p in every])[0]


def deciding(program: Program) -> Program:
    """Routers that send about half of the tokens through, taken for trained ones: of larger scores
    around even odds."""
    weights = program.weights
    for name, weight in program.weights.items():
        if name.startswith("routers."):
            value = weight.load()
            value = value * 40 if value.dim() > 1 else torch.zeros_like(value)
            weights = weights.replacing(Weight.of(name, value))
    return acting(program.replace(weights=weights))


@cache
def compiled(backend: str, *more: str) -> Executable:
    extra = [in_int8() if name == "int8" else named(name, shortest=1) for name in more]
    program = deciding(made(EACH, DepthMixture(), *extra))
    return compile(program, Target(backend, "cpu", threads=1))


def by_hand(prompt: list[int]) -> tuple[list[int], list[int]]:
    """Greedy tokens by the definition, layer by layer, and the layers of each but the first: a
    token that passes by a layer leaves keys and values of the state that it passes with."""
    fast = compile(compiled("eager").program, Target("eager", "cpu"))
    fast.begin(1, 64)
    plan: Any = fast.program.plan

    def call(name: str, tokens: list[int], past: int, fetch: tuple[str, ...]) -> Any:
        places = torch.arange(len(tokens))[None]
        given = {"tokens": torch.tensor([tokens]), "positions": past + places}
        given |= {"past": torch.tensor([past]), "select": places[:, -1:]}
        fn = fast.program.function(name)
        return fast.run(name, {k: v for k, v in given.items() if fn.has_input(k)}, fetch)

    for part in plan.step.parts[:-1]:
        call(part, prompt, 0, ())
    best = call("step.head", prompt, 0, ("logits",))["logits"][0, 0]
    text, layers = [int(best.argmax())], []
    while len(text) < ASKED["max_new_tokens"]:
        past, count, score = len(prompt) + len(text) - 1, LAYERS, 1.0
        for place in range(LAYERS):
            routed = place in plan.depth.routed
            through = not routed or score > plan.depth.threshold
            count -= not through
            name = f"step.{place}" if through else f"step.{place}.fill"
            fetch = ("route",) if place + 1 in plan.depth.routed else ()
            said = call(name, text[-1:], past, fetch)
            score = float(said["route"][0, 0]) if fetch else 1.0
        best = call("step.head", text[-1:], past, ("logits",))["logits"][0, 0]
        text.append(int(best.argmax()))
        layers.append(count)
    return text, layers


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_tokens_pass_by_where_routers_say_so(backend: str) -> None:
    fast, seen = compiled(backend), set()
    for row, mask in zip(PROMPTS, MASK, strict=True):
        prompt = row[mask.bool()].tolist()
        found = generate(fast, torch.tensor([prompt]), return_dict_in_generate=True, **ASKED)
        expected, layers = by_hand(prompt)
        assert found.sequences[0, len(prompt) :].tolist() == expected
        assert found.stats.layers == pytest.approx(sum(layers) / len(layers))
        seen |= set(layers)
    assert len(seen) >= 2, f"tokens only ever ran through {seen} layers"


def test_a_layer_that_is_passed_by_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = compiled("eager")
    calls: list[str] = []
    hold = type(fast).hold

    def holding(self: Any, function: str, *rest: Any) -> Any:
        call = hold(self, function, *rest)

        def counted() -> Any:
            calls.append(function)
            return call()

        return counted

    monkeypatch.setattr(type(fast), "hold", holding)
    fast = compile(fast.program, Target("eager", "cpu"))
    found = generate(fast, PROMPTS[2:3], return_dict_in_generate=True, **ASKED)
    skipped = sum(name.endswith(".fill") for name in calls)
    assert skipped == found.stats.skipped_layers > 0
    ran = {f"step.{place}": calls.count(f"step.{place}") for place in (1, 3)}
    assert all(calls.count(f"{name}.fill") + count == 19 for name, count in ran.items())


@pytest.mark.parametrize("more", ["draft_suffix", "int8"])
def test_it_goes_with_drafts_and_few_bits(more: str) -> None:
    fast = compiled("eager", more)
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **ASKED)
    assert found.sequences.shape == (4, 25) and found.stats.layers <= LAYERS


def test_the_highest_scores_are_chosen() -> None:
    score = torch.tensor([[0.3, 0.9, 0.1, 0.5], [0.2, 0.1, 0.4, 0.3]])
    assert chosen(score, 0.5).tolist() == [[0, 1, 0, 1], [0, 0, 1, 1]]
    assert chosen(score, 0.01).sum(1).tolist() == [1, 1]


def test_routers_learn_to_tell_and_the_target_stays(tmp_path: Path) -> None:
    program = made(EACH, DepthMixture(shift=0.3))
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    states: list[Any] = []
    options = {"steps": 60, "batch": 6, "window": 24, "own": 0.0, "rate": 3e-2}
    done = fit(model, TEXT, out=tmp_path, progress=states.append, **options)
    losses = [state.loss for state in states if state.phase == "training"]
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    for name, weight in program.weights.items():
        same = torch.equal(weight.load(), done.model.program.weights[name].load())
        assert same is not name.startswith("routers."), name
    # Scores say by themselves whether a token is among those: some are, and some are not.
    found = generate(done.model.executable, PROMPTS[:1], return_dict_in_generate=True, **ASKED)
    assert 4 < found.stats.layers < LAYERS
    again = made(EACH, DepthMixture(shift=0.3, weights=str(tmp_path)))
    assert again.plan.depth.trained  # type: ignore[attr-defined]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match=r"cut behind each layer.*set cut_depth\.every=1"):
        made(CutDepth(every=2), DepthMixture())
    with pytest.raises(InputError, match="expected one each"):
        plan = made(EACH, DepthMixture()).plan
        list(MixtureDepth(functions=("a",), routed=(5,), shares=(0.5,)).calls(plan))
