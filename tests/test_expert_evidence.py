"""Experts of mixtures are quantized by what they saw: moments by hand, gains, what too few see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from archs import ARCHS, build
from evidence import evidence_for
from test_gptq import correlated, moments
from torch import Tensor

import graftwork as gw
from graftwork.frontends import import_model
from graftwork.ir import PassError, Program, Weight, WeightStore, arguments, parse_program, run
from graftwork.ir.ops.numerics import Numeric, dequantize
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes.engine import routed
from graftwork.passes.engine.calibrate import Seen, calibrate
from graftwork.passes.engine.evidence import Evidence, TextSample, WorkFolder
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.moments import Moments
from graftwork.passes.engine.validate import empty_states
from graftwork.passes.numerics.methods.awq import Awq
from graftwork.passes.numerics.quantize_weights import QuantizeWeights
from graftwork.passes.numerics.solver import seen_enough
from graftwork.recipe import Recipe

G = torch.ops.graftwork

SMALL = """
program "small" stage=canonical {
  info(model_type="small", vocab_size=4, context=16)
  weight emb: f32[4,2]
  weight router: f32[3,2]
  weight gate_up: f32[3,2,2]
  weight down: f32[3,2,1]
  func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,4] {
    %e: f32[B,T,2] = aten.embedding(@emb, %tokens)
    %x: f32[B*T,2] = aten.reshape(%e, [B*T, 2])
    %r: f32[B*T,3] = aten.linear(%x, @router)
    %top: (f32[B*T,1], i64[B*T,1]) = aten.topk(%r, 1)
    %w: f32[B*T,1] = %top[0]
    %c: i64[B*T,1] = %top[1]
    %m: f32[B*T,2] = graftwork.moe(%x, %c, %w, @gate_up, @down, activation="relu")
    %h: f32[B,T,2] = aten.reshape(%m, [B, T, 2])
    %y: f32[B,T,4] = aten.linear(%h, @emb)
    return logits=%y
  }
}
"""
VALUES = {
    "emb": [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.0, 0.0]],
    "router": [[2.0, 0.0], [0.0, 1.0], [-9.0, -9.0]],
    "gate_up": [[[1.0, 1.0], [2.0, 0.0]], [[0.0, 1.0], [0.0, 3.0]], [[1.0, 0.0], [0.0, 1.0]]],
    "down": [[[1.0], [1.0]], [[1.0], [2.0]], [[1.0], [0.0]]],
}


def small() -> Program:
    held = {name: Weight.of(name, torch.tensor(values)) for name, values in VALUES.items()}
    return parse_program(SMALL, WeightStore(held))


class Watcher:
    """Keeps what it sees of the experts."""

    def __init__(self) -> None:
        self.experts: dict[int, tuple[Moments, Moments]] = {}
        self.tokens: list[int] = []

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        (mixture,) = seen.mixtures
        self.tokens = mixture.tokens.tolist()
        known = [expert for expert, count in enumerate(self.tokens) if count]
        self.experts = dict(mixture.moments(known))
        return {"done": torch.ones(1)}

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return iter(())


def test_moments_of_experts_by_hand() -> None:
    """Of the text 0 1 2 0 the first expert gets tokens 0, 2 and 0: rows (1,0), (1,1), (1,0), so
    that 2/3 sum x x^T = 2/3 [[3,1],[1,1]]. Of these it makes relu(1)*2, relu(2)*2, relu(1)*2, whose
    squares sum up to 24. The second one gets token 1, (0,2), and makes relu(2)*6 of it."""
    program, watcher = small(), Watcher()
    evidence = Evidence(torch.tensor([0, 1, 2, 0]), WorkFolder())
    (node,) = program.step.calls(G.moe.default)
    calibrate(program, [node], evidence, TextSample(1, 4), watcher, "")
    assert watcher.tokens == [3, 1, 0]
    (first, made), (second, other) = watcher.experts[0], watcher.experts[1]
    torch.testing.assert_close(first.hessian, torch.tensor([[2.0, 2 / 3], [2 / 3, 2 / 3]]))
    torch.testing.assert_close(first.magnitude, torch.tensor([1.0, 1 / 3]))
    torch.testing.assert_close(made.hessian, torch.tensor([[16.0]]))
    torch.testing.assert_close(made.magnitude, torch.tensor([8 / 3]))
    assert second.hessian.tolist() == [[0.0, 0.0], [0.0, 8.0]]
    assert other.hessian.tolist() == [[288.0]] and not list(evidence.work.path.rglob("routed-*"))


@cache
def model(name: str = "qwen3_moe") -> Any:
    return build(ARCHS[name])


@cache
def start(name: str = "qwen3_moe") -> Program:
    """A tiny mixture, canonical."""
    return run_passes(import_model(model(name)), Recipe.load("baseline").steps)[0]


def quantized(
    name: str = "qwen3_moe", method: str = "gptq", *, evidence: Evidence | None = None, **more: Any
) -> tuple[Program, tuple[str, ...]]:
    """The mixture with experts of few bits, and the remarks on that."""
    given = {"bits": 3, "group": 8, "windows": 16, "length": 64, "select": ("*experts*",), **more}
    pass_ = QuantizeWeights(method=method, **given)
    program = start(name)
    made, reports = run_passes(program, [Step(pass_)], evidence=evidence or evidence_for(program))
    return made, reports[-1].remarks


def stacks(program: Program, place: int = 0) -> tuple[Tensor, Tensor]:
    """What a stored mixture's weights stand for."""
    given = arguments(program.step.calls(G.quantized_moe.default)[place])

    def values(name: str) -> Tensor:
        keys = (name, f"{name}_scale", f"{name}_offset")
        parts = [program.weights[str(given[k].target)].load() for k in keys if given[k] is not None]
        return dequantize(*parts, bits=given["bits"])

    return values("gate_up"), values("down")


def seen_by(program: Program, windows: Tensor) -> dict[str, Tensor]:
    """What the first mixture of a float program reads of a text."""
    fn = program.step.copy()
    given = arguments(fn.calls(G.moe.default)[0])
    fn.set_outputs({name: given[name] for name in ("x", "experts", "weights")})
    made = program.replace(functions={**program.functions, fn.name: fn})
    inputs = chain_inputs(windows) | empty_states(program, *windows.shape)
    return run(made, fn.name, {n: t for n, t in inputs.items() if fn.has_input(n)})


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.long)])
def test_experts_err_less_by_what_they_saw(name: str) -> None:
    """The first mixture's output on the text of its calibration, against rounding to nearest."""
    program = start(name)
    node = program.step.calls(G.moe.default)[0]
    given = arguments(node)
    windows = evidence_for(program).sampled(TextSample(16, 64), program)
    seen = seen_by(program, windows)
    biases = [given[f"{stack}_bias"] for stack in routed.STACKS]
    own = [None if bias is None else program.weights[str(bias.target)].load() for bias in biases]

    def output(*weights: Tensor) -> Tensor:
        return G.moe(seen["x"], seen["experts"], seen["weights"], *weights, *own, **node.kwargs)

    floats = [program.weights[str(given[stack].target)].load() for stack in routed.STACKS]
    wanted = output(*floats)
    errors = {}
    for method in ("rtn", "gptq", "decoupleq", "autoround", "awq"):
        made, remarks = quantized(name, method, tuning={"steps": 40} if "auto" in method else {})
        assert not remarks
        errors[method] = float((output(*stacks(made)) - wanted).square().sum())
    for method in ("gptq", "decoupleq", "autoround", "awq"):
        assert errors[method] < 0.9 * errors["rtn"], errors


def test_an_expert_that_saw_too_little_is_rounded_and_named() -> None:
    """Experts are told apart by how many tokens chose them; the others have the method's values."""
    program = start()
    windows = evidence_for(program).sampled(TextSample(16, 64), program)
    tokens = torch.bincount(seen_by(program, windows)["experts"].flatten(), minlength=4)
    least = (float(tokens.sort().values[1]) + 0.5) / 32  # two experts saw fewer
    made, (remark,) = quantized(expert_tokens=least)
    few = (~seen_enough(tokens, 32, least)).nonzero().flatten().tolist()
    assert len(few) == 2 and f"gate_up_proj {few[0]}, {few[1]};" in remark
    assert "weights of experts are rounded to nearest, because fewer than" in remark
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight, numeric = program.weights[name].load(), Numeric(3, 8, "affine", torch.float16)
    found = stacks(made)[0]
    for expert in range(4):
        nearest = numeric.dequantize(numeric.quantize(weight[expert]))
        assert torch.equal(found[expert], nearest) == (expert in few)


def test_a_run_that_ended_early_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended among the experts of the second block; and with one expert at a time in memory."""

    def progress(what: str, share: float) -> None:
        if share > 0.8:
            raise KeyboardInterrupt

    whole = quantized()[0]
    with pytest.raises(KeyboardInterrupt):
        quantized(evidence=evidence_for(start(), work=tmp_path, progress=progress))
    (first,) = tmp_path.rglob("block-0000.safetensors")
    assert list(tmp_path.rglob("routed-0001-*")) and not list(tmp_path.rglob("routed-0000-*"))
    stamp = first.stat().st_mtime_ns
    monkeypatch.setattr(routed, "PARTY", 1)
    again = quantized(evidence=evidence_for(start(), work=tmp_path))[0]
    assert first.stat().st_mtime_ns == stamp and not list(tmp_path.rglob("routed-*"))
    assert whole.weights.keys() == again.weights.keys()
    assert all(torch.equal(w.load(), again.weights[n].load()) for n, w in whole.weights.items())


def test_awq_s_factors_change_no_result_before_rounding() -> None:
    x, weights = correlated(16, 64), (torch.randn(32, 16), torch.randn(16, 16))

    def output(gate_up: Tensor, down: Tensor) -> Tensor:
        stacked = gate_up[None], down[None]
        one = torch.zeros(len(x), 1, dtype=torch.int64)
        return G.moe(x, one, torch.ones(len(x), 1), *stacked, activation="silu")

    hidden = torch.nn.functional.silu(x @ weights[0][:16].T) * (x @ weights[0][16:].T)
    seen = moments(hidden)
    made = Awq().balanced_expert(*weights, seen, Numeric(3, 4, "affine"))
    torch.testing.assert_close(output(*made), output(*weights), rtol=1e-4, atol=1e-4)
    factors = made[1][0] / weights[1][0]
    assert float(factors.max() / factors.min()) > 1.1
    torch.testing.assert_close(
        seen.hessian, moments(hidden / factors).hessian, rtol=1e-4, atol=1e-4
    )


def test_a_model_in_memory_stays_as_it_is() -> None:
    """Channels that no text makes use of are zero in what is stored, not in the model."""
    program = small()
    unused = Weight.of("emb", torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]))
    program = program.replace(weights=program.weights.replacing(unused))
    before = {name: weight.load().clone() for name, weight in program.weights.items()}
    pass_ = QuantizeWeights(
        method="decoupleq", bits=8, group=1, windows=2, length=8, exclude=("down", "gate_up")
    )
    made = pass_.apply(program, Evidence(torch.arange(16) % 4, WorkFolder())).program
    assert not made.weights["router.q8"].type.dtype.is_floating_point
    assert all(torch.equal(before[n], w.load()) for n, w in program.weights.items())


def test_what_is_refused() -> None:
    """Stacks that two mixtures multiply, and values that are not finite, by the expert's number."""
    fn = start().step.copy()
    first, second = fn.calls(G.moe.default)
    for place, source in enumerate(first.args[3:5], start=3):
        second.update_arg(place, source)
    shared = start().with_function(fn)
    pass_ = QuantizeWeights(method="gptq", group=8, windows=2, length=16, select=("*experts*",))
    with pytest.raises(PassError, match=r"gate_up_proj is multiplied in several places"):
        pass_.apply(shared, evidence_for(shared))
    tensor = torch.tensor(VALUES["gate_up"])
    tensor[1] = torch.inf
    program = small()
    broken = program.replace(weights=program.weights.replacing(Weight.of("gate_up", tensor)))
    evidence = Evidence(torch.tensor([0, 1, 2, 0]), WorkFolder())
    (node,) = broken.step.calls(G.moe.default)
    with pytest.raises(PassError, match=r"block 1 of 1: what expert 1 of %m makes .* not finite"):
        calibrate(broken, [node], evidence, TextSample(1, 4), Watcher(), "")


def test_an_artifact_keeps_the_bits_and_the_remark(tmp_path: Path) -> None:
    settings = ["group=8", "windows=4", "length=64", "expert_tokens=4"]
    recipe = Recipe.load("gptq").with_options([f"quantize_weights.{one}" for one in settings])
    text = evidence_for(start()).tokens[:4096].view(8, -1).tolist()
    made = gw.optimize(model(), recipe, target="eager:cpu:float32", data=text)
    again = gw.load(made.save(tmp_path / "out"))
    assert made.report is not None and again.report == made.report
    line = next(line for line in made.report.passes if line.name == "quantize_weights")
    assert not line.remarks or "weights of experts are rounded to nearest" in line.remarks[0]
    for place in range(2):
        both = zip(stacks(made.program, place), stacks(again.program, place), strict=True)
        assert all(torch.equal(one, other) for one, other in both)
