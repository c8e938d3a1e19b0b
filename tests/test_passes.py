"""Passes on random programs: results stay, a second run finds nothing, weights stay on disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from feeds import assert_close, step_inputs
from graphs import programs
from handmade import Shape, llama
from hypothesis import given
from hypothesis import strategies as st
from tiny import in_int8

from graftwork.ir import (
    Function,
    InputError,
    ModelInfo,
    Program,
    Sym,
    TensorType,
    Weight,
    WeightStore,
    program_text,
    run,
    type_of,
    verify,
)
from graftwork.ir.weights import Call
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.engine.base import Contract, Outcome, Pass
from graftwork.passes.fusing.cse import Cse
from graftwork.passes.fusing.dce import Dce
from graftwork.passes.fusing.fold_constants import FoldConstants
from graftwork.passes.fusing.fuse_gate_up import FuseGateUp
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.fusing.tabulate_positions import TabulatePositions
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.raising.canonicalize import Canonicalize
from graftwork.passes.raising.raise_activations import RaiseActivations
from graftwork.passes.raising.raise_gated_mlp import RaiseGatedMlp
from graftwork.passes.raising.raise_norms import RaiseNorms
from graftwork.passes.raising.raise_rotary import RaiseRotary
from graftwork.passes.stepping.pick_logits import PickLogits

A, G = torch.ops.aten, torch.ops.graftwork
B, T = Sym("B"), Sym("T")

TIDYING = (Dce(), Cse(), FoldConstants(), Canonicalize())
RAISING = (RaiseActivations(), RaiseNorms(), RaiseRotary(), RaiseGatedMlp(), TabulatePositions())


def applied(pass_: Pass, program: Program) -> Outcome:
    """The outcome; checks that the argument is left alone and both programs compute the same."""
    text = program_text(program)
    outcome = pass_.run(program)
    assert program_text(program) == text
    assert outcome.matches or (outcome.near_miss and outcome.program is program)
    verify(outcome.program)
    if pass_.contract is Contract.EXACT:
        expected = run(program, "step", step_inputs(program))["logits"]
        found = run(outcome.program, "step", step_inputs(outcome.program))["logits"]
        assert_close(found, expected)
    return outcome


@pytest.mark.parametrize("pass_", [*TIDYING, *RAISING], ids=lambda p: p.name)
@given(program=programs(stage="traced"))
def test_random_traced_programs(pass_: Pass, program: Program) -> None:
    """The same results, and a second run has nothing left to do."""
    outcome = applied(pass_, program)
    again = pass_.run(outcome.program)
    assert again.matches == 0, f"{again.matches} more matches:\n{outcome.program}"


@given(program=programs())
def test_random_canonical_programs(program: Program) -> None:
    """All tidying in a row, with raised ops in the program."""
    for pass_ in TIDYING:
        program = applied(pass_, program).program
    live = {node for node in program.function("step") if node.users}
    calls = program.function("step").calls()
    assert all(node in live for node in calls)
    assert not [n for n in calls if n.target in (A.view.default, A.transpose.int, A.clone.default)]


# -- merging equal calls, folding


def small(build: Any) -> Program:
    """A program whose ``step`` is built by `build(fn, x)` on an embedding x f32[B,T,4]."""
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    fn.add_input("positions", TensorType.parse("i64[B,T]"))
    emb = Weight.of("emb", torch.randn(7, 4))
    x = fn.call(A.embedding.default, fn.weight(emb), tokens)
    y, *more = build(fn, x)
    fn.set_outputs({"logits": fn.call(A.linear.default, y, fn.weight(emb))})
    store = WeightStore({w.name: w for w in (emb, *more)})
    return Program("small", {"step": fn}, store, ModelInfo("small", 7, 16))


def test_cse_tells_numbers_apart() -> None:
    """2 and 2.0 and True are equal in Python, and different arguments of an op."""
    program = small(lambda fn, x: [_sum_of_powers(fn, x, 2, 2.0, 2)])
    outcome = applied(Cse(), program)
    powers = outcome.program.function("step").calls(A.pow.Tensor_Scalar)
    assert [type(node.args[1]) for node in powers] == [int, float]


def _sum_of_powers(fn: Function, x: Any, *exponents: float) -> Any:
    total = x
    for exponent in exponents:
        power = fn.call(A.pow.Tensor_Scalar, x, exponent)
        total = fn.call(A.add.Tensor, total, power)
    return total


def test_folding_is_lazy() -> None:
    """Nothing is loaded by the pass; the folded weight loads what it is made of."""
    loaded = []

    def source() -> torch.Tensor:
        loaded.append(1)
        return torch.full((4,), 3.0)

    gain = Weight("gain", TensorType.parse("f32[4]"), Call(source))

    def build(fn: Function, x: Any) -> list[Any]:
        shifted = fn.call(A.add.Tensor, fn.weight(gain), 1.0)
        return [fn.call(A.mul.Tensor, x, shifted), gain]

    outcome = FoldConstants().run(small(build))
    assert not loaded
    assert set(outcome.program.weights) == {"emb", "gain.add"}
    assert torch.equal(outcome.program.weights["gain.add"].load(), torch.full((4,), 4.0))
    assert loaded


def test_folded_weights_fold_again() -> None:
    """A weight that is derived from a derived one gets a name of its own."""

    def build(fn: Function, x: Any) -> list[Any]:
        gain = Weight.of("gain", torch.ones(4))
        first = fn.call(A.add.Tensor, fn.weight(gain), 1.0)
        second = fn.call(A.add.Tensor, fn.weight(gain), 2.0)
        y = fn.call(A.mul.Tensor, fn.call(A.mul.Tensor, x, first), second)
        return [y, gain]

    outcome = applied(FoldConstants(), small(build))
    assert sorted(outcome.program.weights) == ["emb", "gain.add", "gain.add.1"]


# -- fusions, on a whole model


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(bias=True, qk_norm=True),
        Shape(rotary=8, interleaved=True, tied=True, window=3),
        Shape(layer_norm=True, activation="gelu", groups=4),
        Shape(dtype=torch.bfloat16),
    ],
    ids=["plain", "bias and norms", "partial, tied", "layer norm", "bfloat16"],
)
@pytest.mark.parametrize("cached", [False, True], ids=["canonical", "cached"])
def test_fusions(shape: Shape, cached: bool) -> None:
    """Each layer is fused once, before or after the cache came in; then there is nothing left."""
    program = llama(shape)
    if cached:
        program = PickLogits().run(InsertKvCache().run(program).program).program
    # The last norm reads the chosen rows, not a sum.
    norms = 0 if shape.layer_norm else 2 * shape.layers - cached
    for pass_, matches in [
        (FuseQkv(), shape.layers),
        (FuseGateUp(), shape.layers),
        (FuseResidualNorm(), norms),
    ]:
        outcome = applied(pass_, program)
        assert outcome.matches == matches
        program = outcome.program
        assert pass_.run(program).matches == 0
    markers = program.function("step").calls(G.hidden.default)
    assert len(markers) == 1 + 2 * shape.layers
    assert not [name for name in program.weights if name.endswith(("q.weight", "gate.weight"))]


def test_fused_weights_stack_in_order() -> None:
    program = llama(Shape(layers=1))
    parts = [program.weights[f"layers.0.attention.{x}.weight"].load() for x in "qkv"]
    fused = FuseQkv().run(program).program.weights["layers.0.attention.q_k_v.weight"]
    assert torch.equal(fused.load(), torch.cat(parts))


# -- int8


def test_int8_has_one_table_for_a_tied_head() -> None:
    program = in_int8().run(llama(Shape(tied=True))).program
    assert {"embed.q8", "embed.q8.scale"} <= set(program.weights)
    assert "embed" not in program.weights
    kept = in_int8(exclude=("embed",)).run(llama(Shape(tied=True))).program
    assert (
        "embed.q8" not in kept.weights and len(kept.function("step").calls(A.linear.default)) == 1
    )


# -- weights stay where they are


def test_no_pass_loads_weights() -> None:
    """Passes know weights by name and type; the first to need data is a backend."""
    program = llama(Shape(bias=True))

    def absent() -> torch.Tensor:
        raise InputError("a pass loaded a weight")

    store = {name: Weight(name, w.type, Call(absent)) for name, w in program.weights.items()}
    program = program.replace(weights=WeightStore(store))
    few = QuantizeWeights(group=0, select=("*.down.weight",))
    fusing = (FuseQkv(), FuseGateUp(), FuseResidualNorm(), few, in_int8())
    for pass_ in (*TIDYING, *RAISING, *fusing):
        program = pass_.run(program).program
    for end in ("q8", "q4", "q4.scale", "q4.offset"):
        with pytest.raises(InputError, match="a pass loaded"):
            next(w for name, w in program.weights.items() if name.endswith(f".{end}")).load()


# -- rotations that are not quite


@st.composite
def nearly_rotary(draw: Any) -> Program:
    """A rotation of halves in which any step may be a little different."""
    choose = lambda *options: draw(st.sampled_from((*[options[0]] * 3, *options[1:])))  # noqa: E731
    fn = Function("step")
    tokens = fn.add_input("tokens", TensorType.parse("i64[B,T]"))
    positions = fn.add_input("positions", TensorType.parse("i64[B,T]"))
    emb, freq = Weight.of("emb", torch.randn(7, 12)), Weight.of("freq", torch.rand(2))
    call = fn.call
    flat = call(A.embedding.default, fn.weight(emb), tokens)
    x = call(A.permute.default, call(A.reshape.default, flat, [B, T, 2, 6]), [0, 2, 1, 3])
    wide = call(A._to_copy.default, call(A.unsqueeze.default, positions, 2), dtype=torch.float32)
    angle = call(A.mul.Tensor, wide, fn.weight(freq))
    other = choose(angle, call(A.mul.Tensor, angle, 2.0))
    double = call(A.cat.default, [angle, other], 2)
    cos = call(A.unsqueeze.default, call(choose(A.cos.default, A.sin.default), double), 1)
    sin = call(A.unsqueeze.default, call(choose(A.sin.default, A.cos.default), double), 1)
    start = choose(0, 1, 2)
    part = call(A.slice.Tensor, x, 3, start, start + 4)
    rest = call(A.slice.Tensor, x, 3, 4, 6)
    low = call(A.slice.Tensor, part, 3, 0, 2)
    high = call(A.slice.Tensor, part, 3, *choose((2, 4), (1, 3)))
    turned = call(choose(A.neg.default, A.abs.default), choose(high, low))
    halves = choose([turned, low], [low, turned], [turned, high])
    moved = call(A.mul.Tensor, call(A.cat.default, halves, 3), sin)
    kept = call(A.mul.Tensor, choose(part, call(A.neg.default, part)), cos)
    total = call(choose(A.add.Tensor, A.sub.Tensor), kept, moved)
    whole = call(A.cat.default, choose([total, rest], [rest, total]), 3)
    y = call(A.reshape.default, call(A.permute.default, whole, [0, 2, 1, 3]), [B, T, 12])
    fn.set_outputs({"logits": call(A.linear.default, y, fn.weight(emb))})
    store = WeightStore({"emb": emb, "freq": freq})
    return Program("rotary", {"step": fn}, store, ModelInfo("rotary", 7, 16))


@given(program=nearly_rotary())
def test_only_rotations_are_raised(program: Program) -> None:
    """Whatever is raised computes the same as before."""
    raised = applied(RaiseRotary(), program).program
    for node in raised.function("step").calls(G.rotary.default):
        assert type_of(node).dims[2] == T


# -- tables


def test_tables_are_bitwise_equal() -> None:
    """Row p of a table is what the calls gave at position p, whatever its neighbours were."""

    def build(fn: Function, x: Any) -> list[Any]:
        freq = Weight.of("freq", 10000.0 ** -(torch.arange(4) / 4))
        wide = fn.call(A.unsqueeze.default, fn.input("positions"), 2)
        wide = fn.call(A._to_copy.default, wide, dtype=torch.float32)
        angle = fn.call(A.mul.Tensor, wide, fn.weight(freq))
        cos, sin = fn.call(A.cos.default, angle), fn.call(A.sin.default, angle)
        fn.waves = fn.call(A.cat.default, [cos, sin], 2)  # type: ignore[attr-defined]
        return [fn.call(A.mul.Tensor, x, cos), freq]

    program = small(build).replace(info=ModelInfo("small", 7, 4096))
    fn = program.function("step")
    fn.set_outputs({**fn.outputs, "waves": fn.waves})  # type: ignore[attr-defined]
    after = TabulatePositions().run(program).program
    assert not after.function("step").calls(A.cos.default, A.sin.default)
    for positions in (torch.arange(7).expand(2, 7), torch.tensor([[4095, 3, 3], [17, 4094, 0]])):
        tokens = torch.zeros_like(positions)
        inputs = {"tokens": tokens, "positions": positions.contiguous()}
        found, expected = (run(p, "step", inputs)["waves"] for p in (after, program))
        assert torch.equal(found, expected)
