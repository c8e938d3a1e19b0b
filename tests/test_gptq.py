"""GPTQ against a case worked out by hand, its definition, and rounding to nearest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import ARCHS, build
from evidence import evidence_for
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny import MASK, PROMPTS, tiny_llama
from torch import Tensor

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.frontends import import_model
from graftwork.ir import PassError, Program, parse_program, program_text
from graftwork.ir.ops.numerics import Numeric
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.moments import Moments, loss
from graftwork.passes.numerics.methods.base import method_of
from graftwork.passes.numerics.methods.feedback import inverse_factor, round_with_feedback
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.recipe import Recipe
from graftwork.runtime import generate


def moments(x: Tensor) -> Moments:
    """Of inputs [N,K]."""
    return Moments(2 * x.T @ x / len(x), x.abs().mean(0))


def correlated(columns: int, count: int = 512, seed: int = 0) -> Tensor:
    """Inputs f32[count,columns] of few directions, with noise and channels of their own size."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(count, max(2, columns // 4), generator=generator)
    spread = torch.randn(few.shape[1], columns, generator=generator)
    noise = torch.randn(count, columns, generator=generator)
    return (few @ spread + 0.3 * noise) * torch.rand(columns, generator=generator)


def by_definition(weight: Tensor, hessian: Tensor, numeric: Numeric, damp: float) -> Tensor:
    """Column by column: after each, the rest moves to what is best given what is fixed."""
    left, hessian = weight.double().clone(), hessian.double().clone()
    hessian += damp * hessian.diagonal().mean() * torch.eye(len(hessian))
    made = torch.zeros_like(left)
    for i in range(left.shape[1]):
        if i % numeric.group == 0:
            scale, offset = numeric.scales(left[:, i : i + numeric.group].float())
        steps = numeric.steps(left[:, i].float(), scale, offset)
        made[:, i] = numeric.values(steps, scale, offset).double()
        rest = torch.linalg.inv(hessian[i:, i:])
        error = (left[:, i] - made[:, i]) / rest[0, 0]
        left[:, i:] -= torch.outer(error, rest[0])
    return made.float()


def test_a_case_by_hand() -> None:
    """w = (0.6, 0.55, 0, 0), steps of 1 from -1, and the first two inputs depend on each other:
    H = [[2, 1], [1, 2]], whose inverse is [[2, -1], [-1, 2]] / 3.

    Column 0 becomes 1, its error is -0.4; the best for column 1 is then 0.55 - (-0.4 / (2/3)) *
    (-1/3) = 0.35, which becomes 0. To the nearest, both would be 1. e H e is then, of e = (-0.4,
    0.55), 2 * 0.16 - 2 * 0.22 + 2 * 0.3025 = 0.485; of (-0.4, -0.45) it is 1.085.
    """
    numeric = Numeric(2, 4, "affine")
    scales = torch.tensor([1.0]), torch.tensor([-1.0])
    weight = torch.tensor([[0.6, 0.55, 0.0, 0.0]])
    hessian = torch.eye(4)
    hessian[:2, :2] = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    factor = inverse_factor(Moments(hessian.clone(), torch.ones(4)), 1e-9)
    made = numeric.dequantize(
        round_with_feedback(weight, factor, numeric, lambda values, column: scales)
    )
    assert made.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert loss(weight - made, hessian).item() == pytest.approx(0.485)
    nearest = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert loss(weight - nearest, hessian).item() == pytest.approx(1.085)


@pytest.mark.parametrize(
    ("columns", "group", "kind"),
    [
        (64, 16, "affine"),
        (64, 64, "symmetric"),
        (288, 32, "symmetric"),  # two blocks and a rest
        (288, 96, "affine"),  # a block of one group
        (288, 288, "affine"),  # a group over blocks
        pytest.param(
            432, 144, "symmetric", marks=pytest.mark.long
        ),  # a group that no block divides
    ],
)
def test_blocks_do_what_the_definition_does(columns: int, group: int, kind: Any) -> None:
    """Bits decide for one or the other where the values lie half way between two; few do."""
    numeric = Numeric(4, group, kind)
    x, weight = correlated(columns, 2 * columns), torch.randn(8, columns)
    method = method_of("gptq", {"damp": 0.1, "fitted": False})
    made = method.quantize(weight.clone(), numeric, method.prepared(moments(x)))
    wanted = by_definition(weight, moments(x).hessian, numeric, 0.1)
    off = (numeric.dequantize(made) - wanted).abs() > 1e-3
    assert float(off.float().mean()) < 0.02


@given(
    seed=st.integers(0, 1000),
    bits=st.sampled_from([2, 3, 4]),
    groups=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["affine", "symmetric"]),
)
def test_no_worse_than_rounding_where_inputs_depend_on_each_other(
    seed: int, bits: int, groups: int, kind: Any
) -> None:
    numeric = Numeric(bits, 64 // groups, kind, torch.float16)
    seen = moments(correlated(64, seed=seed))
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed))
    method = method_of("gptq", {})
    hessian = seen.hessian.clone()
    made = method.quantize(weight.clone(), numeric, method.prepared(seen))
    own = loss(weight - numeric.dequantize(made), hessian).sum()
    rounded = loss(weight - numeric.dequantize(numeric.quantize(weight)), hessian).sum()
    assert own < rounded


def test_fitted_scales_err_less_than_those_of_ranges() -> None:
    numeric, weight = Numeric(3, 16, "affine", torch.float16), torch.randn(64, 64)
    losses = []
    for fitted in (False, True):
        seen, method = moments(correlated(64)), method_of("gptq", {"fitted": fitted})
        hessian = seen.hessian.clone()
        made = method.quantize(weight.clone(), numeric, method.prepared(seen))
        losses.append(float(loss(weight - numeric.dequantize(made), hessian).sum()))
    assert losses[1] < 0.9 * losses[0]


def test_a_channel_that_the_text_never_uses_becomes_zero() -> None:
    x = correlated(32)
    x[:, 5] = 0
    numeric = Numeric(4, 8)
    weight = torch.randn(3, 32)
    method = method_of("gptq", {})
    made = numeric.dequantize(method.quantize(weight, numeric, method.prepared(moments(x))))
    assert (made[:, 5] == 0).all() and (made != 0).float().mean() > 0.8


def test_what_is_not_positive_definite_says_what_to_do() -> None:
    seen = Moments(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.ones(2))
    with pytest.raises(PassError, match=r"not positive definite.*more text.*damp: 0\.02"):
        method_of("gptq", {}).prepared(seen)


def test_options_are_those_of_the_method() -> None:
    with pytest.raises(
        ValidationError, match=r"no method is called 'magic'; there are .*gptq.*rtn"
    ):
        QuantizeWeights(method="magic")
    with pytest.raises(
        ValidationError, match=r"gptq takes damp, fitted; damp: Input should be greater"
    ):
        QuantizeWeights(method="gptq", tuning={"damp": 0})
    with pytest.raises(ValidationError, match=r"rtn takes no options; damp: Extra inputs"):
        QuantizeWeights(tuning={"damp": 0.1})


def calibrated(name: str, *more: Any, **options: Any) -> Program:
    """The tiny model with weights of few bits, by a method that reads text."""
    given = {"group": 16, "windows": 8, "length": 32, "method": name, **options}
    recipe = Recipe.load({"extends": "baseline", "passes": [*more, {"quantize_weights": given}]})
    start = tiny_llama()
    return run_passes(start, recipe.steps, evidence=evidence_for(start))[0]


@pytest.mark.long
def test_backends_run_the_same_bits() -> None:
    program = calibrated("gptq", bits=3, embedding=8)
    text = program_text(program)
    assert program_text(parse_program(text)) == text and 'method="gptq"' in text
    asked = {"attention_mask": MASK, "max_new_tokens": 24, "eos_token_id": []}
    found = [
        generate(compile(program, Target(backend, "cpu")), PROMPTS, **asked)
        for backend in ("eager", "torch", "onnxruntime")
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_drafts_are_quantized_by_a_pass_of_their_own() -> None:
    draft = "draft_medusa"
    with pytest.raises(
        PassError, match=r"gptq sees what the target's step.*role: target.*role: dr"
    ):
        calibrated("gptq", draft)
    drafts = {"quantize_weights": {"role": "draft", "group": 16}}
    program = calibrated("gptq", draft, drafts, role="target")
    plain = calibrated("gptq", role="target")
    floats = [w for w in program.weights.values() if w.type.dtype.is_floating_point]
    left = {w.name for w in floats if w.name.startswith("layers.") and ".q4." not in w.name}
    assert left == {f"layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)}
    name = "layers.1.o.q4"
    assert torch.equal(program.weights[name].load(), plain.weights[name].load())


def test_a_weight_that_is_multiplied_twice_is_refused() -> None:
    program = tiny_llama()
    fn = program.step.copy()
    for node in fn.graph.find_nodes(op="get_attr"):
        if node.target == "layers.1.up":
            node.target = "layers.0.up"
    shared = program.with_function(fn)
    pass_ = QuantizeWeights(method="gptq", group=16)
    with pytest.raises(PassError, match=r"layers\.0\.up is multiplied in several places.*exclude"):
        pass_.apply(shared, evidence_for(shared))


@pytest.mark.long
def test_experts_that_are_rounded_all_the_same_are_told_of() -> None:
    start = import_model(build(ARCHS["mixtral"]))
    given = {"bits": 2, "group": 0, "windows": 2, "length": 16, "method": "jlcm"}
    recipe = Recipe.load({"extends": "baseline", "passes": [{"quantize_weights": given}]})
    reports = run_passes(start, recipe.steps, evidence=evidence_for(start, 200))[1]
    (remark,) = next(r for r in reports if r.record.name == "quantize_weights").remarks
    assert "mixtures are rounded to nearest, not by jlcm" in remark
