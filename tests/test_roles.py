"""A second function of the target, added right after the frontend, is served like the step.

It is an exit: a copy of the step that ends after the fourth of eight layers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from archs import Arch, build
from selection import mostly_long

from graftwork import Recipe
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.frontends import import_model
from graftwork.ir import Function, Program, Role, run
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.ir.rewrite.cleanup import sweep
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.validate import empty_states

A, G = torch.ops.aten, torch.ops.graftwork
EXIT, LAYER = "exit", 3
TOKENS = torch.tensor([[5, 9, 30, 2, 77, 41, 8], [1, 2, 3, 4, 5, 6, 7]])
DEEP = Arch(
    "llama",
    {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    blocks=8,
)


@cache
def model() -> Program:
    """The model as its frontend gives it."""
    return import_model(build(DEEP))


@cache
def traced() -> Program:
    """The model with the exit."""
    program = model()
    fn = program.step.copy()
    fn.name = EXIT
    blocks = {n.kwargs["layer"]: n for n in fn.calls(G.hidden.default)}
    blocks[7].replace_all_uses_with(blocks[LAYER])
    sweep(fn)
    return program.with_function(fn)


@cache
def made(recipe: str, with_exit: bool = True) -> Program:
    """The program that a recipe makes."""
    return run_passes(traced() if with_exit else model(), Recipe.load(recipe).steps)[0]


def ops(fn: Function) -> list[Any]:
    return [node.target for node in fn.calls()]


@pytest.mark.parametrize("recipe", mostly_long(["baseline", "int8"], keep=("int8",)))
def test_an_exit_is_made_of_what_the_step_is_made_of(recipe: str) -> None:
    program, plain = made(recipe), made(recipe, with_exit=False)
    fn = program.function(EXIT)
    assert fn.role is Role.TARGET
    # Not a state nor a weight more than without it, and of the states half are its own layers'.
    assert set(program.states) == set(plain.states) and len(program.states) == 16
    assert sum(fn.has_input(name) for name in program.states) == 2 * (LAYER + 1)
    assert set(program.weights) == set(plain.weights)
    # Norms, rotations, gated blocks, products, residual norms, chosen logits, argmax.
    ours, layers = ops(fn), LAYER + 1
    product = G.quantized_linear.default if recipe == "int8" else A.linear.default
    assert ours.count(G.rms_norm.default) == 2  # the first, and the last, of chosen tokens
    assert ours.count(G.add_rms_norm.default) == 2 * layers - 1
    assert ours.count(G.rotary.default) == 2 * layers
    assert ours.count(G.glu.default) == ours.count(G.attend.default) == layers
    assert ours.count(product) == 4 * layers + 1
    assert A.rsqrt.default not in ours and A.cos.default not in ours
    assert fn.has_input("select") and set(fn.outputs) - set(program.states) == {"logits", "argmax"}


@pytest.mark.parametrize("recipe", ["baseline", "int8"])
def test_the_reference_agrees_with_the_model(recipe: str) -> None:
    """The interpreter gives the exit's logits as they were when it was cut."""
    wanted = run(traced(), EXIT, {n: chain_inputs(TOKENS)[n] for n in ("tokens", "positions")})
    found = reference(made(recipe))
    scale = wanted["logits"].abs().max()
    bound = 1e-5 if recipe == "baseline" else 0.1
    assert (found - wanted["logits"]).abs().max() <= bound * scale


@pytest.mark.parametrize("recipe", ["baseline", "int8"])
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("rows", [1, 2], ids=["alone", "batch"])
def test_backends_run_an_exit_on_the_rows_of_the_step(recipe: str, backend: str, rows: int) -> None:
    """The step's rows are the exit's, whoever wrote them: steps and exits take turns."""
    program, tokens = made(recipe), TOKENS[:rows]
    executable = compile(program, Target.parse(backend))
    executable.begin(rows, 16)
    found: list[dict[str, torch.Tensor]] = []
    past = 0
    for function, width in (("step", 3), (EXIT, 1), (EXIT, 2), ("step", 1)):
        given = chain_inputs(tokens[:, past : past + width], past)
        for name in dict.fromkeys((function, EXIT)):  # again, on the same rows, after a step
            fn = program.function(name)
            inputs = {n: value for n, value in given.items() if fn.has_input(n)}
            outputs = executable.run(name, inputs, ("logits", "argmax"))
        found.append({name: value.clone() for name, value in outputs.items()})
        past += width
    wanted = reference(program)[:rows]
    logits = torch.cat([outputs["logits"] for outputs in found], 1)
    assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    assert torch.equal(torch.cat([outputs["argmax"] for outputs in found], 1), wanted.argmax(-1))


def reference(program: Program) -> torch.Tensor:
    """The exit's logits [B,T,V] of the tokens, in one step of the interpreter."""
    states = empty_states(program, *TOKENS.shape)
    given = chain_inputs(TOKENS) | states
    fn = program.function(EXIT)
    inputs = {name: value for name, value in given.items() if fn.has_input(name)}
    return run(program, EXIT, inputs)["logits"]
