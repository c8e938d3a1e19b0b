"""Calibration: what solvers see of each block, what later blocks see, and runs that were killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from evidence import evidence_for, tokens
from handmade import Shape, cached_llama, llama
from torch import Tensor

from graftwork.ir import InputError, PassError, Program, Weight, WeightStore, run
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes.engine import calibrate as replaying
from graftwork.passes.engine.blocks import blocks_of, weight_of
from graftwork.passes.engine.calibrate import Seen, calibrate, code_of
from graftwork.passes.engine.evidence import Evidence, TextSample, WorkFolder
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.moments import Moments
from graftwork.passes.engine.validate import empty_states
from graftwork.passes.fusing.fuse_residual_norm import FuseResidualNorm
from graftwork.passes.numerics.quantize_weights import QuantizeWeights

SAMPLE = TextSample(windows=6, length=20)
LINEAR = torch.ops.aten.linear.default
LAYERS = 3


class Watcher:
    """Keeps the moments, and halves the weights of the first block for those after it."""

    def __init__(self, halved: str = "") -> None:
        self.halved, self.blocks = halved, list[dict[str, Moments]]()

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        self.blocks.append({})
        for tap, nodes in seen.products.items():
            for node in nodes:
                self.blocks[-1][weight_of(node)] = seen.moments[tap]
        return {name: torch.ones(1) for name in self.blocks[-1]}

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, self.given[name] / 2) for name in kept if name == self.halved)

    given: Mapping[str, Tensor] = {}


def layers_of(program: Program) -> list[torch.fx.Node]:
    """The products of the step's layers."""
    return [n for n in program.step.calls(LINEAR) if weight_of(n) not in ("head", "embed")]


def direct(program: Program, windows: Tensor) -> dict[str, Moments]:
    """The same moments, by one run of the whole step."""
    fn = program.step.copy()
    taps = {f"t{i}": n.args[0] for i, n in enumerate(fn.calls(LINEAR))}
    fn.set_outputs(taps)  # type: ignore[arg-type]
    made = program.replace(functions={"step": fn})
    out = run(made, "step", chain_inputs(windows) | empty_states(program, *windows.shape))
    found = {}
    for tap, node in zip(out.values(), fn.calls(LINEAR), strict=True):
        rows = tap.reshape(-1, tap.shape[-1]).double()
        hessian = (2 * rows.T @ rows / len(rows)).float()
        found[weight_of(node)] = Moments(hessian, rows.abs().mean(0).float())
    return found


@pytest.mark.parametrize("form", ["canonical", "cached", "fused"])
def test_moments_are_those_of_the_whole_step(form: str) -> None:
    shape = Shape(layers=LAYERS)
    program = llama(shape) if form == "canonical" else cached_llama(shape)
    if form == "fused":
        program = FuseResidualNorm().run(program).program
    evidence, watcher = evidence_for(program), Watcher()
    found = calibrate(program, layers_of(program), evidence, SAMPLE, watcher, form)
    assert len(watcher.blocks) == LAYERS
    wanted = direct(program, evidence.sampled(SAMPLE, program))
    assert found.keys() == {weight_of(node) for node in layers_of(program)}
    for block in watcher.blocks:
        assert len(block) == len(found) / LAYERS
        for name, moments in block.items():
            scale = float(wanted[name].hessian.abs().max())
            assert (moments.hessian - wanted[name].hessian).abs().max() < 1e-5 * scale
            assert torch.equal(moments.hessian, moments.hessian.T)
            torch.testing.assert_close(moments.magnitude, wanted[name].magnitude)


def test_later_blocks_see_what_was_chosen_for_earlier_ones() -> None:
    program = llama(Shape(layers=LAYERS))
    name = "layers.0.mlp.down.weight"
    assert name in program.weights
    evidence, watcher = evidence_for(program), Watcher(halved=name)
    watcher.given = {name: program.weights[name].load()}
    calibrate(program, layers_of(program), evidence, SAMPLE, watcher, "halved")
    half = Weight.of(name, program.weights[name].load() / 2)
    changed = program.replace(weights=WeightStore({**program.weights, name: half}))
    wanted = direct(changed, evidence.sampled(SAMPLE, program))
    for block in watcher.blocks[1:]:
        for weight, moments in block.items():
            torch.testing.assert_close(
                moments.hessian, wanted[weight].hessian, rtol=1e-4, atol=1e-4
            )
    own = direct(program, evidence.sampled(SAMPLE, program))
    error = (
        watcher.blocks[1]["layers.1.attention.q.weight"].hessian
        - own["layers.1.attention.q.weight"].hessian
    )
    assert error.abs().max() > 0.01


def test_blocks_hold_little_of_each_other() -> None:
    """Between two blocks: the stream (as two terms of a sum where that is fused), and tables."""
    fused = FuseResidualNorm().run(cached_llama(Shape(layers=LAYERS))).program
    for program in (llama(Shape(layers=LAYERS)), fused):
        blocks = blocks_of(program.step, layers_of(program))
        assert len(blocks) == LAYERS and not blocks[-1].passed.outputs
        for block in blocks[:-1]:
            assert 1 <= len(block.passed.outputs) <= 5
            weights = block.read.weights | block.passed.weights
            assert len([n for n in weights if n.startswith("layers.")]) <= 10


def gptq(program: Program, evidence: Evidence) -> Program:
    """The program after a pass that reads text."""
    pass_ = QuantizeWeights(method="gptq", group=16, windows=6, length=20)
    return run_passes(program, [Step(pass_)], evidence=evidence)[0]


KILLED = """
import os, signal, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from evidence import evidence_for
from handmade import Shape, llama
from test_calibrate import gptq
program = llama(Shape(layers=3))
def progress(what, share):
    if share > float(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
gptq(program, evidence_for(program, work=Path(sys.argv[1]), progress=progress))
"""


@pytest.mark.long
def test_a_killed_run_goes_on_and_makes_the_same_bits(tmp_path: Path) -> None:
    """Killed when the second of three blocks is solved, and the text has yet to run through it."""
    here = str(Path(__file__).parent)
    given = [sys.executable, "-c", KILLED, str(tmp_path), "0.62"]
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(given, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (first,) = tmp_path.rglob("block-0000.safetensors")
    stamp = first.stat().st_mtime_ns
    program = llama(Shape(layers=LAYERS))
    said: list[float] = []
    again = evidence_for(program, work=tmp_path, progress=lambda what, share: said.append(share))
    resumed = gptq(program, again)
    whole = gptq(program, evidence_for(program))
    assert first.stat().st_mtime_ns == stamp and said == sorted(said) and said[-1] == 1
    assert not list(tmp_path.rglob("before-*"))
    assert set(resumed.weights) == set(whole.weights)
    for name, weight in whole.weights.items():
        assert torch.equal(weight.load(), resumed.weights[name].load()), name


def test_what_other_text_or_options_or_weights_made_is_not_used(tmp_path: Path) -> None:
    program, other = llama(Shape(layers=1)), llama(Shape(layers=1), seed=1)
    gptq(program, evidence_for(program, work=tmp_path))
    gptq(program, evidence_for(program, work=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    gptq(program, evidence_for(program, 5000, work=tmp_path))
    pass_ = QuantizeWeights(method="gptq", bits=3, group=16, windows=6, length=20)
    pass_.apply(program, evidence_for(program, work=tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    found, wanted = (
        gptq(other, evidence_for(other, work=tmp_path)),
        gptq(other, evidence_for(other)),
    )
    assert all(torch.equal(w.load(), found.weights[n].load()) for n, w in wanted.weights.items())


def test_what_other_code_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = llama(Shape(layers=1))
    gptq(program, evidence_for(program, work=tmp_path))
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "gptq.py").write_text("another rule")
    monkeypatch.setattr(replaying, "PASSES", changed)
    gptq(program, evidence_for(program, work=tmp_path))
    monkeypatch.undo()
    gptq(program, evidence_for(program, work=tmp_path))
    made = {path.parent for path in tmp_path.rglob("block-0000.safetensors")}
    assert len(made) == 2


def test_a_solvers_own_module_is_its_code(tmp_path: Path) -> None:
    def code() -> str:
        spec = importlib.util.spec_from_file_location("strange", tmp_path / "strange.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules["strange"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return code_of(module.Strange)

    (tmp_path / "strange.py").write_text("class Strange: bits = 3\n")
    first = code()
    assert first == code() != code_of(int)
    (tmp_path / "strange.py").write_text("class Strange: bits = 2\n")
    assert code() != first


def test_damaged_results_are_made_anew(tmp_path: Path) -> None:
    program = llama(Shape(layers=2))
    whole = gptq(program, evidence_for(program, work=tmp_path / "a"))
    made = {name: weight.load().clone() for name, weight in whole.weights.items()}
    (path,) = (tmp_path / "a").rglob("block-0001.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    again = gptq(program, evidence_for(program, work=tmp_path / "a"))
    assert all(torch.equal(made[name], w.load()) for name, w in again.weights.items())


def test_results_stay_while_somebody_has_them() -> None:
    program = llama(Shape(layers=1))
    evidence = evidence_for(program)
    made, folder = gptq(program, evidence), evidence.work.path
    del evidence
    assert folder.is_dir() and made.weights["layers.0.attention.q.weight.q4"].load().any()
    del made
    assert not folder.exists()


def test_too_little_text_says_how_much_is_needed() -> None:
    program = llama()
    with pytest.raises(InputError, match=r"6 windows of 20 tokens, 120 in all.* has 100: give 20"):
        gptq(program, evidence_for(program, 100))
    with pytest.raises(PassError, match=r"needs text to calibrate on, 6 windows of 20 tokens"):
        pass_ = QuantizeWeights(method="gptq", group=16, windows=6, length=20)
        run_passes(program, [Step(pass_)])


def test_a_window_is_no_longer_than_the_context() -> None:
    program = llama(Shape(context=16))
    evidence = evidence_for(program)
    assert evidence.sampled(TextSample(3, 512), program).shape == (3, 16)


def test_ids_of_another_vocabulary_are_refused() -> None:
    program = llama()
    for bad in (-1, program.info.vocab_size):
        ids = tokens(program.info.vocab_size, 400)
        ids[77] = bad
        with pytest.raises(InputError, match=f"token id {bad} is outside the vocabulary of 61"):
            gptq(program, Evidence(ids, WorkFolder()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_activations_that_are_not_finite_are_named(bad: float) -> None:
    program = llama()
    tensor = program.weights["layers.1.norm1.weight"].load().clone()
    tensor[3] = bad
    changed = Weight.of("layers.1.norm1.weight", tensor)
    broken = program.replace(weights=WeightStore({**program.weights, changed.name: changed}))
    with pytest.raises(PassError, match=r"block 2 of 2: what %rms_norm_2 holds .* not finite"):
        gptq(broken, evidence_for(program))


def test_a_file_in_the_place_of_the_work_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"work: cannot use .*file as a folder"):
        WorkFolder(tmp_path / "file")
