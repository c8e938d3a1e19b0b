"""What sessions cost and how they are set up: memory, threads, files."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from test_onnxruntime_executable import TARGET, Twin, executable, step_of
from tiny import tiny_llama

from graftwork.backends import Target, compile, cores
from graftwork.backends.onnxruntime import session as sessions
from graftwork.backends.onnxruntime import threads as counts
from graftwork.backends.onnxruntime.executable import OnnxExecutable
from graftwork.backends.onnxruntime.store import LARGE, WeightFile
from graftwork.ir import InputError, Program, Weight, WeightStore
from graftwork.ir.weights import Call
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax


def option(made: OnnxExecutable, name: str) -> Any:
    """A setting of the session of the first step."""
    step = next(iter(made._made["step"].values()))
    try:
        return step.session.get_session_options().get_session_config_entry(name)
    except RuntimeError:
        return None  # never set


def started(program: Program, target: Target = TARGET) -> OnnxExecutable:
    """An executable that has run one step."""
    made = compile(program, target)
    assert isinstance(made, OnnxExecutable)
    made.begin(1, 8)
    made.run("step", step_of(2), ["logits"])
    return made


def watched(program: Program) -> tuple[Program, list[int]]:
    """The program with sources that count how many of their tensors are alive, and the counts."""
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    counts: list[int] = []

    def source(weight: Weight) -> Any:
        def load() -> torch.Tensor:
            tensor = weight.load().clone()
            alive.add(tensor)
            counts.append(len(alive))
            return tensor

        return load

    weights = {n: Weight(n, w.type, Call(source(w))) for n, w in program.weights.items()}
    return program.replace(weights=WeightStore(weights)), counts


@pytest.mark.long
def test_weights_are_written_one_at_a_time() -> None:
    program, counts = watched(cached_llama(Shape(layers=4)))
    assert started(program).capacity
    gc.collect()
    assert len(counts) >= len(program.weights)
    assert max(counts) <= 3  # query, key and value are joined


def test_short_memory_leaves_weights_in_their_file(monkeypatch: pytest.MonkeyPatch) -> None:
    program = cached_llama()
    assert option(started(program), "session.disable_prepacking") != "1"
    monkeypatch.setattr(sessions, "free_memory", lambda: 1000)
    assert option(started(program), "session.disable_prepacking") == "1"
    twin = Twin(program, 1)
    twin.step(5)
    twin.step(1)


def test_threads_are_those_of_the_target() -> None:
    for threads in (1, 3):
        made = started(cached_llama(), Target(threads=threads))
        step = next(iter(made._made["step"].values()))
        assert step.session.get_session_options().intra_op_num_threads == threads
    assert cores.default_threads() >= 1


def test_drafts_run_on_all_cores_where_they_read_much(monkeypatch: pytest.MonkeyPatch) -> None:
    program = tiny_llama().replace(guests={"same": tiny_llama()})
    passes = (DraftModel(model="same"), InsertKvCache(), AddArgmax())
    program = run_passes(program, [Step(each) for each in passes])[0]
    draft = program.function("draft")
    read = counts.bytes_read(program, draft)
    tables = {str(node.args[0].target) for node in draft.calls(*counts.LOOK_UPS)}
    own = [w.type.nbytes for n, w in program.weights.items() if n in draft.weights - tables]
    assert tables and read == sum(own)
    target = Target(threads=2)
    few = counts.Threads.of(program, target)
    assert few.counts == {"step": 2, "draft": 1} and not few.in_turn
    monkeypatch.setattr(counts, "LARGE", read)
    many = counts.Threads.of(program, target)
    assert many.counts == {"step": 2, "draft": 2} and many.in_turn == {"step", "draft"}
    made = started(program, target)
    assert option(made, "session.force_spinning_stop") == "1"


def test_a_quota_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores.default_threads.cache_clear()
    monkeypatch.setattr(cores, "_quota", lambda: 1)
    monkeypatch.setattr(cores, "_core", lambda cpu: str(cpu // 2))  # two threads a core
    assert cores.default_threads() == 1
    monkeypatch.undo()
    cores.default_threads.cache_clear()


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("graftwork.backends.onnxruntime.executable.store", full)
    made = executable(cached_llama())
    made.begin(1, 8)
    with pytest.raises(InputError, match="TMPDIR"):
        made.run("step", step_of(2), ["logits"])


def test_weight_files_align_large_tensors_and_write_once(tmp_path: Path) -> None:
    file = WeightFile(tmp_path / "weights")
    small, large = Weight.of("a", torch.ones(3)), Weight.of("b", torch.rand(LARGE // 4))
    assert file.place(small) == (0, 12)
    offset, length = file.place(large)
    assert offset % 4096 == 0 and length == LARGE
    assert file.place(large) == (offset, length) and file.end == offset + length
    data = (tmp_path / "weights").read_bytes()[offset:]
    assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32), large.load())


def test_missing_provider_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "preload_cuda", lambda: None)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match="no CUDA provider"):
        sessions.providers(Target(device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_provider_that_does_not_load_is_an_error(tmp_path, monkeypatch):
    """ONNX Runtime itself goes on with the CPU."""
    made = started(cached_llama(Shape()))
    path = next(made._scratch.path.glob("*.onnx"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(sessions, "preload_cuda", lambda: None)
    own = any(step.session for step in made._made["step"].values())
    with pytest.raises(InputError, match=r"could not load CUDA's libraries.*onnxruntime:cpu"):
        sessions.open_session(path, Target(device="cuda"), own_ops=own)
