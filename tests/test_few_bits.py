"""Weights of few bits from the recipe to the text: backends run the same kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from archs import ARCHS, build
from handmade import Shape, llama
from selection import mostly_long, rarely
from tiny import MASK, PROMPTS, named, tiny_llama

from graftwork.backends import compile, tiles
from graftwork.backends.kernel_uses import kernels_line
from graftwork.backends.onnxruntime import probe, rows_moe, rows_quantized
from graftwork.backends.onnxruntime.emit import Emitted, emit
from graftwork.backends.onnxruntime.lower import lower
from graftwork.backends.target import Target
from graftwork.backends.torch import native_quantized
from graftwork.backends.torch.tiled import with_tiles
from graftwork.frontends import import_model
from graftwork.ir import Program, type_of
from graftwork.ir.execution.executable import DECOMPOSED
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

G = torch.ops.graftwork
ASKED: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 24, "eos_token_id": []}


def quantized(*more: Any, model: Program | None = None, **options: Any) -> Program:
    """A model, if not said otherwise the tiny one, with weights of few bits."""
    passes = [*more, {"quantize_weights": {"group": 16, **options}}]
    recipe = Recipe.load({"name": "few", "extends": "baseline", "passes": passes})
    return run_passes(model or tiny_llama(), recipe.steps)[0]


def text(program: Program, backend: str) -> torch.Tensor:
    """What is generated after the prompts."""
    found = generate(compile(program, Target(backend, "cpu")), PROMPTS, **ASKED)
    assert isinstance(found, torch.Tensor)
    return found


def step_model(program: Program) -> Emitted:
    """The step as ONNX Runtime is given it."""
    lowered = lower(program, program.step.name, native=True)
    return emit(lowered.function(program.step.name), lowered.weights, native=True)


@pytest.mark.parametrize("backend", mostly_long(("onnxruntime", "torch"), ["onnxruntime"]))
@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 4, "span": 16},
        pytest.param({"bits": 3, "symmetric": True}, marks=pytest.mark.long),
        pytest.param({"bits": 8, "scales": "f32", "embedding": True}, marks=pytest.mark.long),
    ],
)
def test_backends_generate_what_the_meaning_says(options: dict[str, Any], backend: str) -> None:
    program = quantized(**options)
    assert torch.equal(text(program, backend), text(program, "eager"))


@pytest.mark.long
def test_drafts_change_no_token() -> None:
    program = quantized({"draft_suffix": {"tokens": 4, "shortest": 1}}, bits=4)
    for backend in ("torch", "onnxruntime"):
        assert torch.equal(text(program, backend), text(quantized(bits=4), backend))


def test_torch_holds_each_weight_once() -> None:
    """In tiles: the bits as they were stored are not loaded."""
    program = quantized(bits=4)
    laid = with_tiles(program)
    assert not any(fn.calls(G.quantized_linear.default) for fn in laid.functions.values())
    assert len(laid.step.calls(native_quantized.LINEAR)) == len(
        program.step.calls(G.quantized_linear.default)
    )
    stored = {name for name in program.weights if name.endswith((".q4", ".scale", ".offset"))}
    assert stored and not stored & set(laid.weights)
    held = compile(program, Target("torch", "cpu"))
    assert set(held.weights) == set(laid.weights)


def test_a_table_that_is_the_heads_weight_is_held_once() -> None:
    """Rows are looked up in the tiles that the head multiplies."""
    tied = llama(Shape(tied=True, context=128))
    program = quantized(model=tied, bits=4, embedding=True)
    (looked_up,) = program.step.calls(G.quantized_embedding.default)
    laid = with_tiles(program).step
    (row,) = laid.calls(native_quantized.EMBEDDING)
    heads = [
        n for n in laid.calls(native_quantized.LINEAR) if n.args[1].target == row.args[1].target
    ]
    assert len(heads) == 1 and heads[0].args[2].target == row.args[2].target
    initializers = [w.name for _, w in step_model(program).pending]
    assert looked_up.args[1].target not in initializers
    assert initializers.count(row.args[1].target) == 1
    assert torch.equal(text(program, "onnxruntime"), text(program, "eager"))


@pytest.mark.long
def test_torch_looks_up_in_the_heads_tiles_as_well() -> None:
    program = quantized(model=llama(Shape(tied=True, context=128)), bits=4, embedding=True)
    assert torch.equal(text(program, "torch"), text(program, "eager"))


@pytest.mark.long
def test_products_that_round_nothing_read_few_bits_too() -> None:
    """Weights stay packed, and both backends give the logits of their values."""
    program = quantized(bits=4, rounded=False)
    laid = with_tiles(program)
    products = laid.step.calls(native_quantized.FLOAT_LINEAR)
    assert len(products) == len(program.step.calls(G.quantized_linear.default)) > 0
    assert not laid.step.calls(native_quantized.LINEAR, G.quantized_linear.default)
    assert {type_of(node.args[1]).dtype for node in products} == {torch.uint8}
    assert step_model(program).has_own_ops
    wanted = score(compile(program, Target("eager", "cpu")), PROMPTS)
    for backend in ("torch", "onnxruntime"):
        found = score(compile(program, Target(backend, "cpu")), PROMPTS)
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_onnxruntime_does_without_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler: kernels of ONNX Runtime's own, and no op that it lacks."""
    program = quantized(bits=4)
    assert probe.quantized_ops_available() == "" and step_model(program).has_own_ops
    monkeypatch.setattr(rows_quantized, "quantized_ops_available", lambda: "no compiler")
    assert not step_model(program).has_own_ops
    said = []
    for backend in ("eager", "onnxruntime"):
        executable = compile(program, Target(backend, "cpu"))
        said.append(score(executable, PROMPTS))
    # It may round activations by block; the meaning does by row.
    assert (said[0] - said[1]).abs().max() < 0.05 * said[0].abs().max()


MIXTURES = rarely(("gpt_oss", "mixtral", "qwen3_moe"), 9)
"""Gated by silu, and with biases and limits."""


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"rounded": False}, marks=pytest.mark.long),
        pytest.param({"span": 8}, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_mixtures_have_few_bits(name: str, how: dict[str, Any]) -> None:
    """They stay packed on both backends, and a token's logits are those of the meaning, whatever
    shares its step."""
    given = named("quantize_weights", bits=4, group=8, **how)
    start = import_model(build(ARCHS[name]))
    steps = [*Recipe.load("baseline").steps, Step(given)]
    program = run_passes(start, steps)[0]
    mixtures = program.step.calls(G.quantized_moe.default)
    assert mixtures and not program.step.calls(G.moe.default)
    laid = with_tiles(program)
    assert len(laid.step.calls(native_quantized.EXPERTS)) == 2 * len(mixtures)
    assert not laid.step.calls(G.quantized_moe.default, G.quantized_experts.default)
    assert step_model(program).has_own_ops
    ids = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted = score(compile(program, Target("eager", "cpu")), ids)
    for backend in ("torch", "onnxruntime"):
        executable = compile(program, Target(backend, "cpu"))
        found = score(executable, ids)
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
        alone = score(executable, ids[1:2])
        assert torch.equal(alone[0], found[1])


def test_experts_without_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own kernel takes their values, as in models for others."""
    start = import_model(build(ARCHS["gpt_oss"]))
    given = named("quantize_weights", bits=4, group=8, rounded=False)
    program = run_passes(start, [*Recipe.load("baseline").steps, Step(given)])[0]
    for module in (rows_quantized, rows_moe):
        monkeypatch.setattr(module, "quantized_ops_available", lambda: "no compiler")
    assert "MoE" in {node.op_type for node in step_model(program).model.graph}
    assert not step_model(program).has_own_ops
    ids = torch.tensor([[3, 9, 4, 11, 30, 8]])
    wanted = score(compile(program, Target("eager", "cpu")), ids)
    found = score(compile(program, Target("onnxruntime", "cpu")), ids)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_executables_name_the_kernels_of_few_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager runs the meaning; ONNX Runtime graftwork's own kernels, or else its own."""
    program = quantized(bits=4, embedding=8)
    eager = compile(program, Target("eager", "cpu")).kernels()
    assert {use.kernel for use in eager} == {DECOMPOSED}
    made = compile(program, Target("onnxruntime", "cpu"))
    assert made.kernels() == ()  # nothing is compiled
    generate(made, PROMPTS, **ASKED)
    assert {use.kernel for use in made.kernels()} == {tiles.kernel_name()}
    assert sorted(use[:3] + use[4:] for use in made.kernels()) == sorted(
        use[:3] + use[4:]
        for use in eager
        if use[0] == "step"  # no prompt was given as rows
    )
    monkeypatch.setattr(rows_quantized, "quantized_ops_available", lambda: "no compiler")
    other = compile(program, Target("onnxruntime", "cpu"))
    generate(other, PROMPTS, **ASKED)
    found = {(use.what, use.bits): use.kernel for use in other.kernels()}
    assert found["look-up", 8] == DECOMPOSED and found["product", 4].startswith("MatMulNBits (4 b")
    line = kernels_line(made.kernels())
    count = sum(use.calls for use in eager if use.bits == 4 and use[0] == "step")
    assert line == f"{tiles.kernel_name()}: {count} in 4, 2 in 8 bits"
