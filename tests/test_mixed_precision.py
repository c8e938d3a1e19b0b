"""Bits by weight: the choice against all choices, the harm by hand, and models that run."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from archs import ARCHS, build
from evidence import evidence_for
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from selection import one_in
from tiny import MASK, PROMPTS, tiny_llama

from graftwork.backends import Target, compile
from graftwork.frontends import import_model
from graftwork.ir import Program, run
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.numerics.mixed_precision import Choice, MixedPrecision, least_harm
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.recipe import Recipe
from graftwork.runtime import generate

ROWS = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.floats(-0.1, 2)), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.integers(0, 20))
def test_no_other_choice_harms_less(rows: list[list[tuple[int, float]]], more: int) -> None:
    options = [[Choice(2, cost, harm) for cost, harm in row] for row in rows]
    budget = sum(min(cost for cost, _ in row) for row in rows) + more
    found = least_harm(options, budget)
    assert sum(choice.cost for choice in found) <= budget
    least = min(
        sum(choice.harm for choice in choices)
        for choices in product(*options)
        if sum(choice.cost for choice in choices) <= budget
    )
    assert sum(choice.harm for choice in found) == pytest.approx(least)


def log_probabilities(program: Program, tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1]).expand(tokens.shape)
    logits = run(program, "step", {"tokens": tokens, "positions": places.contiguous()})["logits"]
    return logits.double().log_softmax(-1)


def test_the_harm_is_the_divergence_of_predictions() -> None:
    """Of one layer's down projection in two bits, and of nothing else."""
    program = tiny_llama()
    one = MixedPrecision(windows=3, length=16, group=8, choices=(2, 8))
    evidence = evidence_for(program)
    groups = one._groups(program)
    names = [group.names for group in groups]
    place = next(i for i, some in enumerate(names) if any("down" in name for name in some))
    found = one._harms(program, groups, evidence)[place][0]
    weight = program.weights[names[place][0]]
    rounding = QuantizeWeights(bits=2, group=8)
    numeric = rounding.numeric_of(weight, False)
    near = numeric.dequantize(numeric.quantize(weight.load()))
    other = program.replace(weights=program.weights.replacing(type(weight).of(weight.name, near)))
    tokens = evidence.sampled(one.text, program)
    clean, changed = log_probabilities(program, tokens), log_probabilities(other, tokens)
    wanted = (clean.exp() * (clean - changed)).sum(-1).mean()
    assert found == pytest.approx(float(wanted), rel=1e-6) and found > 1e-4


def test_products_of_one_input_share_their_bits() -> None:
    """So that they are fused all the same."""
    program = tiny_llama()
    groups = MixedPrecision(group=8)._groups(program)
    assert [len(group.names) for group in groups] == [3, 1, 2, 1] * 2
    assert groups[0].values == sum(program.weights[name].load().numel() for name in groups[0].names)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_values_have_so_many_bits_on_average(method: str) -> None:
    program = tiny_llama()
    one = MixedPrecision(bits=3.5, group=8, length=32, windows=2, method=method)
    outcome = one.learn(program, evidence_for(program))
    bits = {
        str(node.args[1].target): (int(node.kwargs["bits"]), node.args[1])
        for node in outcome.program.step.calls(torch.ops.graftwork.quantized_linear.default)
    }
    assert len(bits) == 14 and len({few for few, _ in bits.values()}) > 1
    stored = outcome.program.weights
    packed = sum(stored[name].type.nbytes * 8 for name in bits)
    values = sum(stored[name].type.nbytes * 8 // few for name, (few, _) in bits.items())
    assert 3.2 < packed / values <= 3.5
    assert f"{packed / values:.2f} bits on average" in outcome.remarks[0]


def test_experts_stay_floats_and_a_remark_says_so() -> None:
    program = import_model(build(ARCHS["qwen3_moe"]))
    canonical = run_passes(program, Recipe.load("baseline").steps)[0]
    one = MixedPrecision(bits=5, choices=(2, 8), group=8, length=8, windows=1)
    outcome = one.learn(canonical, evidence_for(canonical, 100))
    assert (
        outcome.remarks[1] == "the experts of 2 mixtures stay floats: quantize_weights takes them"
    )
    assert len(outcome.program.step.calls(torch.ops.graftwork.moe.default)) == 2


@pytest.mark.long
def test_it_harms_less_than_the_same_bits_everywhere() -> None:
    program = tiny_llama(4)
    evidence = evidence_for(program)
    one = MixedPrecision(bits=4, group=8, windows=8, length=64)
    mixed = one.learn(program, evidence).program
    alike = QuantizeWeights(bits=4, group=8).run(program).program
    tokens = evidence.tokens[1000:3048].reshape(16, 128)
    clean = log_probabilities(program, tokens)
    harms = [
        float((clean.exp() * (clean - log_probabilities(made, tokens))).sum(-1).mean())
        for made in (mixed, alike)
    ]
    assert harms[0] < 0.9 * harms[1]


@pytest.mark.parametrize("target", one_in(2, ["onnxruntime", "eager"]))
def test_the_recipe_runs(target: str) -> None:
    program = tiny_llama()
    recipe = Recipe.load("mixed_precision").with_options(["mixed_precision.length=32"])
    made, _ = run_passes(program, recipe.steps, evidence=evidence_for(program))
    texts = generate(
        compile(made, Target.parse(target)), PROMPTS, attention_mask=MASK, max_new_tokens=6
    )
    wanted = generate(
        compile(made, Target.parse("eager")), PROMPTS, attention_mask=MASK, max_new_tokens=6
    )
    assert torch.equal(texts, wanted)


def test_methods_and_choices_that_are_none_are_refused() -> None:
    with pytest.raises(ValidationError, match="no method is called 'magic'"):
        MixedPrecision(method="magic", tuning={})
    with pytest.raises(ValidationError, match="at least two numbers of bits"):
        MixedPrecision(choices=(4,))
