"""AWQ: scalings that change nothing, factors that help, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama, llama
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_llama
from torch import Tensor

from graftwork.ir import Program, Weight, WeightStore
from graftwork.ir.ops.numerics import Numeric
from graftwork.passes.engine.blocks import weight_of
from graftwork.passes.engine.calibrate import Seen, calibrate
from graftwork.passes.engine.evidence import TextSample
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.moments import Moments, loss
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.numerics.folding import Fold, fold_of
from graftwork.passes.numerics.methods.awq import Awq
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.recipe import Recipe

LINEAR = torch.ops.aten.linear.default
SAMPLE = TextSample(windows=6, length=20)


class Balancer:
    """Scales, and rounds nothing."""

    def __init__(self, names: list[str], fixed: frozenset[str] = frozenset()) -> None:
        self.numerics = {name: Numeric(3, 16, "affine") for name in names}
        self.fixed = fixed

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        return Awq(grid=4).balanced(seen, self.numerics, self.fixed)

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from kept.items()


def scaled(program: Program, fixed: frozenset[str] = frozenset()) -> dict[str, Weight]:
    """The weights that change, by name."""
    nodes = [n for n in program.step.calls(LINEAR) if weight_of(n) not in ("head", "embed")]
    solver = Balancer([weight_of(node) for node in nodes], fixed)
    return calibrate(program, nodes, evidence_for(program), SAMPLE, solver, "")


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("canonical", Shape()),
        ("canonical", Shape(layer_norm=True, bias=True, groups=4)),
        ("cached", Shape(bias=True)),
        ("fused", Shape(heads=6, groups=2)),
    ],
)
def test_without_rounding_nothing_changes(form: str, shape: Shape) -> None:
    program = llama(shape) if form == "canonical" else cached_llama(shape)
    if form == "fused":
        program = FuseResidualNorm().run(program).program
    made = scaled(program)
    changed = {
        n for n, w in made.items() if not torch.allclose(w.load(), program.weights[n].load())
    }
    norms = {n for n in changed if "norm" in n}
    assert len(norms) == 2 * shape.layers * (1 + shape.layer_norm)
    layers = {n for n in program.weights if n.startswith("layers.")}
    assert len(changed) >= len([n for n in layers if n.endswith(".weight")])
    if shape.bias:
        assert any("bias" in n and ("v" in n or "up" in n) for n in changed)
    after = program.replace(weights=WeightStore({**program.weights, **made}))
    tokens = torch.arange(12).view(1, 12) * 5 % shape.vocab
    before, found = (reference_logits(p, tokens) for p in (program, after))
    assert (found - before).abs().max() < 1e-5 * before.abs().max()


def test_what_others_read_stays_as_it_is() -> None:
    program = cached_llama(Shape(), joined=False)
    fixed = frozenset({"layers.0.norm1.weight", "kv.1.value", "layers.1.mlp.up.weight"})
    made = scaled(program, fixed)
    assert "layers.0.norm1.weight" not in made and "layers.0.norm2.weight" in made
    assert "layers.0.attention.q.weight" not in made and "layers.1.attention.o.weight" not in made
    assert "layers.1.mlp.down.weight" not in made and "layers.0.mlp.down.weight" in made


def test_heads_that_share_values_share_factors() -> None:
    fold = Fold((), sharing=(2, 3, 2))
    channels = torch.arange(12.0)
    pooled = fold.pooled(channels)
    assert pooled.tolist() == [2.0, 3.0, 8.0, 9.0]
    assert fold.spread(pooled).tolist() == [2.0, 3.0] * 3 + [8.0, 9.0] * 3


def test_values_that_nothing_can_scale_have_no_fold() -> None:
    program = llama(Shape(layers=1))
    fn = program.step.copy()
    (node,) = [n for n in fn.calls(LINEAR) if weight_of(n) == "layers.0.mlp.down.weight"]
    assert fold_of(node.args[0]) is not None  # type: ignore[arg-type]
    with fn.graph.inserting_before(node):
        bent = fn.call(torch.ops.aten.gelu.default, node.args[0])
        half = fn.call(torch.ops.aten.add.Tensor, node.args[0], bent)
    assert fold_of(bent) is None and fold_of(half) is None
    (gated,) = fn.calls(torch.ops.graftwork.glu.default)
    fn.set_outputs({**fn.outputs, "seen": gated.args[1]})  # type: ignore[dict-item]
    assert fold_of(gated) is None  # something else reads the linear side


@given(seed=st.integers(0, 200), bits=st.sampled_from([2, 3, 4]))
def test_factors_and_ranges_never_cost_more_than_rounding(seed: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 32, generator=generator) * torch.rand(32, generator=generator) ** 4
    weight = torch.randn(16, 32, generator=generator)
    numeric = Numeric(bits, 16, "affine", torch.float16)
    seen = Moments(2 * x.T @ x / len(x), x.abs().mean(0))
    method = Awq()
    factors = method.factors([(weight, numeric)], seen, Fold(()))
    plain = numeric.dequantize(numeric.quantize(weight))
    alone = numeric.dequantize(Awq().quantize(weight, numeric, Moments(seen.hessian, x[0])))
    both = numeric.dequantize(numeric.quantize(weight * factors)) / factors
    rounded = loss(weight - plain, seen.hessian).sum()
    assert loss(weight - both, seen.hessian).sum() <= rounded * (1 + 1e-5)
    # Of each group by itself, so the whole may be a little more; but not on independent inputs.
    own = Moments(torch.diag(seen.hessian.diagonal()), x[0])
    clipped = numeric.dequantize(method.quantize(weight, numeric, own))
    assert loss(weight - clipped, own.hessian).sum() <= loss(weight - plain, own.hessian).sum()
    assert torch.isfinite(alone).all()


def test_the_recipe_makes_a_program_that_runs() -> None:
    settings = [f"quantize_weights.{o}" for o in ("group=16", "windows=4", "length=32")]
    recipe = Recipe.load("awq").with_options(settings)
    start = tiny_llama()
    program, _ = run_passes(start, recipe.steps, evidence=evidence_for(start))
    assert "layers.0.norm1.scaled" in program.weights and "layers.0.norm1" not in program.weights
    tokens = torch.arange(12).view(1, 12) * 5 % 32
    before, after = reference_logits(start, tokens), reference_logits(program, tokens)
    assert (after - before).abs().max() < 0.3 * before.abs().max()


def test_a_draft_that_reads_the_targets_norm_keeps_it() -> None:
    from graftwork.ir import Role

    program = llama(Shape(layers=1))
    draft = program.step.copy()
    draft.name, draft.role = "early", Role.DRAFT
    both = program.replace(functions={**program.functions, "early": draft})
    pass_ = QuantizeWeights(method="awq", group=16, windows=4, length=20, role="target")
    made = pass_.apply(both, evidence_for(both)).program
    assert "layers.0.norm1.weight" in made.step.weights
    alone = pass_.apply(program, evidence_for(program)).program
    assert "layers.0.norm1.weight.scaled" in alone.step.weights
