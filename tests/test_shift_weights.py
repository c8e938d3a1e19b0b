"""One store of weights for several numbers of bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from archs import ARCHS, build
from tiny import PROMPTS, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.frontends import import_model
from graftwork.ir import PassError, Program, arguments
from graftwork.ir.ops.numerics import pack, unpack
from graftwork.model import Model
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.numerics.shift_weights import ShiftWeights
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

G = torch.ops.graftwork
NAME = "layers.0.o.q8"


def stored(**options: object) -> Program:
    """The tiny model with weights of eight bits, as backends compile it."""
    pass_ = {"quantize_weights": {"bits": 8, "embedding": True, "group": 16, **options}}
    return run_passes(tiny_llama(), Recipe.load({"extends": "baseline", "passes": [pass_]}).steps)[
        0
    ]


def test_values_by_hand() -> None:
    """As 4 bits: 7 is nearer to 0 than to 16, 8 as near to both, 255 would become 16."""
    program = stored()
    weight = program.weights[NAME]
    steps = torch.tensor([0, 7, 8, 24, 100, 247, 248, 255]).repeat(32, 4)
    assert weight.type.dims == (32, 32)
    given = type(weight).of(NAME, pack(steps, 8))
    program = program.replace(weights=program.weights.replacing(given))
    after = ShiftWeights(bits=4).run(program).program
    wanted = torch.tensor([0, 0, 1, 2, 6, 15, 15, 15]).repeat(32, 4)
    assert torch.equal(unpack(after.weights[f"{NAME}.as4"].load(), 4), wanted.int())
    scale = program.weights[f"{NAME}.scale"].load()
    assert torch.equal(after.weights[f"{NAME}.scale.as4"].load(), scale * 16)
    assert after.weights[f"{NAME}.offset"] is program.weights[f"{NAME}.offset"]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_values_are_the_stored_ones_up_to_half_a_step(bits: int, symmetric: bool) -> None:
    program = stored(symmetric=symmetric, scales="f32")
    after = ShiftWeights(bits=bits).run(program).program
    op = torch.ops.graftwork.quantized_linear.default
    for old, new in zip(program.step.calls(op), after.step.calls(op), strict=True):
        found = []
        for fn_program, node in ((program, old), (after, new)):
            load = {a: fn_program.weights[str(a.target)].load() for a in node.all_input_nodes[1:4]}
            packed, scale, *offset = load.values()
            width = int(node.kwargs["bits"])  # type: ignore[call-overload]
            steps = unpack(packed, width).float().view(*scale.shape, -1)
            middle = 0 if not symmetric else 2 ** (width - 1)
            start = 0 if symmetric else offset[0][..., None]
            found.append((steps - middle) * scale[..., None] + start)
        error = (found[1] - found[0]).abs() / scale[..., None]
        assert error.max() < 1.01  # the largest have no step above them
        assert (error < 0.501).float().mean() > 0.85


@pytest.mark.long
def test_an_artifact_is_read_in_fewer_bits_and_every_backend_runs_it(tmp_path: Path) -> None:
    program = stored()
    model = Model(program, Target("eager", "cpu"), {"name": "test", "passes": []})
    folder = model.save(tmp_path / "out")
    whole, shifted = gw.load(folder), gw.load(folder, bits=4)
    assert (
        str(whole.program) == str(program) and shifted.recipe["passes"][-1]["options"]["bits"] == 4
    )
    ops = shifted.program.step.calls(torch.ops.graftwork.quantized_linear.default)
    assert {node.kwargs["bits"] for node in ops} == {4}
    asked = {"max_new_tokens": 8, "eos_token_id": []}
    wanted = shifted.generate(PROMPTS, **asked)
    for backend in ("torch", "onnxruntime"):
        found = generate(compile(shifted.program, Target(backend, "cpu")), PROMPTS, **asked)
        assert torch.equal(found, wanted), backend
    again = gw.load(shifted.save(tmp_path / "four"))
    assert torch.equal(again.generate(PROMPTS, **asked), wanted)
    with pytest.raises(PassError, match=r"shift_weights.*weights of 4 bits are stored"):
        gw.load(tmp_path / "four", bits=4)


def test_weights_that_share_a_store_share_what_is_made_of_it() -> None:
    program = QuantizeWeights(bits=8, embedding=True, group=16).run(tiny_llama()).program
    first = ShiftWeights(bits=4).run(program).program
    assert len([name for name in first.weights if name.startswith("embed")]) == 3


def test_experts_are_shifted_too() -> None:
    """As the weights of layers are: numbers rounded to fewer, scales larger."""
    start = import_model(build(ARCHS["mixtral"]))
    steps = [*Recipe.load("baseline").steps, Step(QuantizeWeights(bits=8, group=8))]
    program = run_passes(start, steps)[0]
    made = ShiftWeights(bits=4).run(program).program
    (node, *_) = made.step.calls(G.quantized_moe.default)
    given = arguments(node)
    assert given["bits"] == 4
    for stack in ("gate_up", "down"):
        name = str(given[stack].target)
        eight = unpack(program.weights[name.removesuffix(".as4")].load(), 8)
        assert torch.equal(unpack(made.weights[name].load(), 4), ((eight + 8) // 16).clamp(max=15))
        scale = str(given[f"{stack}_scale"].target)
        before = program.weights[scale.removesuffix(".as4")].load()
        assert torch.equal(made.weights[scale].load(), before * 16)
    ids = torch.tensor([[3, 9, 4]])
    eight_bits, four_bits = (
        score(compile(p, Target("eager", "cpu")), ids) for p in (program, made)
    )
    assert 0 < (four_bits - eight_bits).abs().max() < 0.5 * eight_bits.abs().max()
