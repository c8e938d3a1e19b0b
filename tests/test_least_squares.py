"""Least squares against a case worked out by hand, its definition, and rounding to nearest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from evidence import evidence_for
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama
from torch import Tensor

import graftwork as gw
from graftwork.cli.demo import demo_folder
from graftwork.ir import InputError, Program
from graftwork.ir.ops.numerics import Numeric, Quantized
from graftwork.passes.engine.feed import watched
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.moments import Moments
from graftwork.passes.numerics.methods.base import method_of
from graftwork.passes.numerics.methods.least_squares import Fitted, importance, solved
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.recipe import Recipe

A = torch.ops.aten


def test_a_case_by_hand() -> None:
    """x = (0, 1, 2, 10) with steps (0, 0, 1, 3), those of the nearest scale, 10/3, and offset, 0.

    sum q = 4, q^2 = 10, q x = 32, x = 13: s = (4 * 32 - 4 * 13) / (4 * 10 - 4^2) = 76/24, and
    o = (13 - 4 s) / 4 = 1/12. The squared error falls from 1 + (4/3)^2 to 31/12. Where the last
    value counts for nothing: sum q = 1, q^2 = 1, q x = 2, x = 3 of three: s = 3/2, o = 1/2. Without
    offsets steps count from 2, the middle: (-2, -2, -1, 1), q x = 6, q^2 = 10.
    """
    x, steps = torch.tensor([[[0.0, 1.0, 2.0, 10.0]]]), torch.tensor([[[0.0, 0.0, 1.0, 3.0]]])
    now = Fitted(torch.tensor([[10 / 3]]), torch.tensor([[0.0]]), steps)
    affine = Numeric(2, 4, "affine")
    scale, offset = solved(x, now, None, affine)
    assert offset is not None
    assert (scale.item(), offset.item()) == pytest.approx((76 / 24, 1 / 12))
    error = (affine.values(steps, scale[..., None], offset[..., None]) - x).square().sum()
    assert error.item() == pytest.approx(31 / 12) and error < 1 + (4 / 3) ** 2
    scale, offset = solved(x, now, torch.tensor([[1.0, 1.0, 1.0, 0.0]]), affine)
    assert offset is not None
    assert (scale.item(), offset.item()) == pytest.approx((3 / 2, 1 / 2))
    scale, offset = solved(x, now._replace(offset=None), None, Numeric(2, 4))
    assert offset is None and scale.item() == pytest.approx(6 / 10)


def test_steps_that_are_all_alike_keep_their_scale() -> None:
    now = Fitted(torch.tensor([[3.0]]), torch.tensor([[5.0]]), torch.full((1, 1, 4), 2.0))
    scale, offset = solved(torch.rand(1, 1, 4), now, None, Numeric(2, 4, "affine"))
    assert offset is not None and (scale.item(), offset.item()) == (3.0, 5.0)


def error(weight: Tensor, made: Quantized, numeric: Numeric, used: Tensor) -> Tensor:
    """Squared errors of groups [N,G]; used: f32[K]."""
    squares = (numeric.dequantize(made) - weight).square() * used
    return squares.unflatten(1, (-1, numeric.group)).sum(-1)


@given(
    seed=st.integers(0, 1000),
    bits=st.sampled_from([2, 3, 4, 8]),
    kind=st.sampled_from(["affine", "symmetric"]),
    ranges=st.sampled_from([1, 4]),
    weighs=st.booleans(),
)
def test_no_group_is_worse_than_rounded_to_nearest(
    seed: int, bits: int, kind: Any, ranges: int, weighs: bool
) -> None:
    """Outliers, a group of zeros and one of equal values are among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(9, 64, generator=generator) ** 3
    weight[0, :32], weight[1, :32] = 0, 0.7
    used = torch.rand(64, generator=generator) ** 4 + 1e-4 if weighs else None
    numeric = Numeric(bits, 32, kind)
    made = method_of("least_squares", {"ranges": ranges}).quantize(weight, numeric, used)
    counts = torch.ones(64) if used is None else used
    own, nearest = (error(weight, q, numeric, counts) for q in (made, numeric.quantize(weight)))
    assert (own <= nearest * (1 + 1e-4) + 1e-9).all()
    assert own.sum() < nearest.sum()


def test_more_ranges_and_channels_that_count_more_err_less() -> None:
    weight, numeric = torch.randn(256, 128), Numeric(4, 32, "symmetric", torch.float16)
    used = torch.rand(128) ** 4 + 1e-3
    few, many = (
        error(weight, method_of("least_squares", {"ranges": n}).quantize(weight, numeric, used),
              numeric, used).sum()
        for n in (1, 4)
    )  # fmt: skip
    alike = method_of("least_squares", {}).quantize(weight, numeric, None)
    assert many < few < error(weight, alike, numeric, used).sum()


def test_a_channel_counts_by_its_mean_square() -> None:
    moments = Moments(torch.diag(torch.tensor([2.0, 6.0, 0.0, 0.0])), torch.ones(4))
    assert importance(moments.hessian.diagonal()).tolist() == pytest.approx([1.0, 3.0, 1e-4, 1e-4])


def quantized(program: Program, text: bool, **options: Any) -> Program:
    given = {"method": "least_squares", "group": 16, "windows": 4, "length": 32, **options}
    recipe = Recipe.load({"extends": "baseline", "passes": [{"quantize_weights": given}]})
    return run_passes(program, recipe.steps, evidence=evidence_for(program, 512) if text else None)[
        0
    ]


def test_text_is_made_use_of_where_there_is_some() -> None:
    program = tiny_llama()
    alone, seen = (quantized(program, text) for text in (False, True))
    name = "layers.1.down.q4"
    assert alone.weights[name].type == seen.weights[name].type
    assert not torch.equal(alone.weights[name].load(), seen.weights[name].load())


def test_a_channel_counts_by_all_that_reads_it() -> None:
    program = tiny_llama()
    fn = program.step.copy()
    for node in fn.graph.find_nodes(op="get_attr"):
        if node.target == "layers.1.up":
            node.target = "layers.0.up"
    shared, evidence = program.with_function(fn), evidence_for(program)
    pass_ = QuantizeWeights(method="least_squares", group=16, windows=4, length=32)
    made = pass_.apply(shared, evidence).program
    _, used = made.weights["layers.0.up.q4"].inputs
    nodes = [n for n in fn.calls(A.linear.default) if n.args[1].target == "layers.0.up"]
    values = {f"x{i}": node.args[0] for i, node in enumerate(nodes)}
    assert len(values) == 2
    windows = evidence.sampled(pass_.sample, shared)
    found = list(watched(shared, fn, values, windows))
    squares = sum(x.pow(2).sum((0, 1)) for seen in found for x in seen.values())
    torch.testing.assert_close(used.load(), (squares / squares.mean()).clamp(min=1e-4))


def test_nobody_has_to_give_a_text() -> None:
    """Of 4 bits the bundled one says how much channels count; of 8 it would change next to nothing;
    and what has no tokenizer does without."""
    made = gw.optimize(demo_folder(), "int4", target="eager:cpu:float32")
    assert made.report is not None
    (line,) = (line for line in made.report.passes if line.name == "quantize_weights")
    assert "a bundled text" in "".join(line.remarks)
    layers = [n for n in made.program.weights if n.endswith("down_proj.weight.q4")]
    assert layers and all(len(made.program.weights[name].inputs) == 2 for name in layers)
    small = {"extends": "int4", "passes": [{"quantize_weights": {"group": 16}}]}
    for source, recipe in ((demo_folder(), "int8"), (build(ARCHS["llama"]), small)):
        report = gw.optimize(source, recipe, target="eager:cpu:float32").report
        assert report is not None and "bundled" not in str(report)


def test_drafts_are_fitted_without_text() -> None:
    given = {"method": "least_squares", "group": 16, "windows": 4, "length": 32}
    passes = ["draft_medusa", {"quantize_weights": given}]
    steps = Recipe.load({"extends": "baseline", "passes": passes}).steps
    program = tiny_llama()
    made, _ = run_passes(program, steps, evidence=evidence_for(program, 512))
    assert not [
        n for n, w in made.weights.items() if n.endswith("proj") and w.type.dtype.is_floating_point
    ]


def test_data_for_int4_is_text_to_learn_from_or_prompts_to_check_on() -> None:
    recipe = {
        "extends": "int4",
        "passes": [{"quantize_weights": {"windows": 4, "length": 32, "group": 16}}],
    }
    model = build(ARCHS["llama"])
    ids = evidence_for(tiny_llama(), 512).tokens
    plain = gw.optimize(model, recipe, target="eager")
    fitted = gw.optimize(model, recipe, target="eager", data=[ids.tolist()])
    checked = gw.optimize(model, recipe, target="eager", data=[ids[:8].tolist()], validate=True)
    name = "model.layers.1.mlp.down_proj.weight.q4"
    stored = [made.program.weights[name].load() for made in (plain, fitted, checked)]
    assert torch.equal(stored[0], stored[2]) and not torch.equal(stored[0], stored[1])
    with pytest.raises(InputError, match=r"4 windows of 32 tokens, 128 in all, and the text has 8"):
        gw.optimize(model, recipe, target="eager", data=[ids[:8].tolist()])


def test_windows_begin_as_texts_of_the_model_do() -> None:
    program = tiny_llama()
    evidence = evidence_for(program, 512)
    plain = evidence.sampled(QuantizeWeights(windows=4, length=32).sample, program)
    first = program.replace(info=replace(program.info, bos=int(evidence.tokens[0])))
    begun = evidence.sampled(QuantizeWeights(windows=4, length=32).sample, first)
    assert (begun[:, 0] == evidence.tokens[0]).all() and torch.equal(begun[:, 1:], plain[:, 1:])
    assert (plain[1:, 0] != evidence.tokens[0]).any()
