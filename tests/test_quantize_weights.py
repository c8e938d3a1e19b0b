"""Quantized programs against the float ones they come from."""

from __future__ import annotations

import pytest
import torch
from handmade import Shape, llama
from safetensors.torch import load_file

from graftwork.artifact.shards import write_weights
from graftwork.ir import Program, Weight, WeightStore, run
from graftwork.ir.ops.numerics import Numeric
from graftwork.passes.fusing.fuse_gate_up import FuseGateUp
from graftwork.passes.fusing.fuse_qkv import FuseQkv
from graftwork.passes.numerics.computed import computed
from graftwork.passes.numerics.methods.rtn import RoundToNearest
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.numerics.stored import Form

SHAPE = Shape(tied=True, bias=True)
TOKENS = torch.randint(0, SHAPE.vocab, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(program: Program) -> torch.Tensor:
    """The step's logits [B,T,V] by the reference interpreter."""
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    return run(program, "step", {"tokens": TOKENS, "positions": positions})["logits"]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"bits": 8}, 0.02),
        ({"bits": 8, "embedding": True, "group": 0, "symmetric": True}, 0.02),
        ({"bits": 6}, 0.05),
        ({"bits": 4}, 0.2),
        ({"bits": 4, "group": 16, "scales": "f32", "symmetric": True}, 0.2),
        ({"bits": 3, "group": 8}, 0.3),
        ({"bits": 2, "group": 8}, 0.8),
    ],
    ids=str,
)
def test_fewer_bits_are_further_from_the_float_program(options: dict, most: float) -> None:
    options = {"group": 16, **options}
    program = llama(SHAPE)
    quantized = QuantizeWeights(**options).run(program)
    assert quantized.matches == 7 * SHAPE.layers + 2 * options.get("embedding", False)
    wanted = logits(program)
    assert most / 100 < error(logits(quantized.program), wanted) < most
    # Not rounded: the very program, with weights that are what their bits stand for.
    plain = QuantizeWeights(**options, rounded=False).run(program).program
    assert error(logits(plain), logits(with_rounded_weights(program, plain))) < 1e-5


def with_rounded_weights(program: Program, quantized: Program) -> Program:
    """The float program with the values of another's quantized weights."""
    (done,) = {r.options for r in quantized.provenance} or {()}
    assert not done  # the pass was run without a manager
    changed = {}
    for name, weight in program.weights.items():
        stored = [w for n, w in quantized.weights.items() if n.startswith(f"{name}.q")]
        if stored:
            numeric = stored[0].made.kwargs["form"].numerics[0]
            assert isinstance(numeric, Numeric)
            values = numeric.dequantize(numeric.quantize(weight.load()))
            changed[name] = Weight.of(name, values)
    return program.replace(weights=WeightStore({**program.weights, **changed}))


def test_merging_and_quantizing_commute() -> None:
    """A row of a merged weight is quantized as it is alone, so the order of passes is free."""
    program = llama(SHAPE)
    quantize = QuantizeWeights(group=16)
    before = FuseGateUp().run(FuseQkv().run(quantize.run(program).program).program)
    after = quantize.run(FuseGateUp().run(FuseQkv().run(program).program).program)
    assert torch.equal(logits(before.program), logits(after.program))
    op = torch.ops.graftwork.quantized_linear.default
    counts = [len(p.program.step.calls(op)) for p in (before, after)]
    assert counts == [4 * SHAPE.layers] * 2


def test_a_tied_table_is_stored_once_and_its_float_copy_goes() -> None:
    program = QuantizeWeights(group=16, embedding=8).run(llama(SHAPE))
    names = {n for n in program.program.weights if n.startswith("embed")}
    assert names == {"embed.q8", "embed.q8.scale"}
    assert program.program.weights["embed.q8.scale"].type.shape == (SHAPE.vocab, 4)


def test_weights_stored_alike_are_one_and_others_are_apart() -> None:
    program = llama(SHAPE)
    twice = QuantizeWeights(select=("*.up.weight",), group=16)
    again = QuantizeWeights(select=("*.down.weight",), bits=2, group=8)
    result = again.run(twice.run(program).program).program
    kinds = {n.rpartition(".q")[2] for n in result.weights if ".q" in n and "weight" in n}
    assert {"4", "4.scale", "4.offset", "2", "2.scale", "2.offset"} <= kinds
    assert len(result.step.calls(torch.ops.graftwork.quantized_linear.default)) == 2 * SHAPE.layers


def test_the_parts_of_a_weight_are_rounded_together(tmp_path, monkeypatch) -> None:
    """Also when an artifact is written, whatever order its file has."""
    program, rounded = QuantizeWeights(group=16).run(llama(SHAPE)).program, list[int]()
    whole = RoundToNearest.quantize

    def counted(self, weight, numeric, prepared):
        rounded.append(numeric.bits)
        return whole(self, weight, numeric, prepared)

    wanted = {name: weight.load() for name, weight in program.weights.items()}
    monkeypatch.setattr(RoundToNearest, "quantize", counted)
    (written,) = write_weights(tmp_path, list(program.weights.values()))
    assert len(rounded) == sum(name.endswith(".scale") for name in program.weights)
    file = load_file(tmp_path / written.name)
    assert file.keys() == wanted.keys()
    assert all(torch.equal(file[name], tensor) for name, tensor in wanted.items())


def test_what_is_widened_only_to_be_rounded_stays_narrow() -> None:
    """The same bits of half the memory."""
    half = Weight.of("w", torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).half())
    form, method = Form((Numeric(4, 16, "affine", torch.float16),)), RoundToNearest()
    narrow = computed(half.cast(torch.float32), form, method, WeightStore())
    wide = computed(Weight.of("w", half.load().float()), form, method, WeightStore())
    assert all(part.inputs == (half,) for part in narrow.values())
    for name, part in narrow.items():
        assert torch.equal(part.load(), wide[name].load())
