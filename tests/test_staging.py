"""Sessions on another device, as far as a CPU can show it: memory of their own, copied to and from.

What a session reads is then never the memory that callers write, and what callers read is never the
memory that it writes, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from onnxruntime_helpers import without_own_attention
from selection import one_in
from staged import Poisoned, texts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graftwork.backends import compile
from graftwork.backends.onnxruntime import executable as onnx_executable
from graftwork.backends.onnxruntime import repeated
from graftwork.backends.onnxruntime.attention import TOTAL
from graftwork.backends.onnxruntime.executable import OnnxExecutable
from graftwork.backends.staging import Staging, Stream
from graftwork.backends.target import Target
from graftwork.ir import TensorType, Weight
from graftwork.ir.execution.analysis import is_repeatable

TARGET = Target(threads=1)
RECIPES = ["baseline", "copyspec", "recycling", "medusa", "eagle", "eagle_chain", "snapkv", "free"]


@pytest.fixture(autouse=True)
def _kernels_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graftwork's own are the CPU's."""
    without_own_attention(monkeypatch)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables are made as if the CPU were another device."""
    monkeypatch.setattr(onnx_executable, "_stream", lambda target: Stream(torch.device("cpu")))
    monkeypatch.setattr("graftwork.backends.onnxruntime.step.Staging", Poisoned)


@pytest.mark.parametrize("name", one_in(4, RECIPES))
def test_texts_are_the_same(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = program_of(name, tmp_path)
    wanted = texts(program, TARGET)
    request.getfixturevalue("staged")
    assert texts(program, TARGET) == wanted


@pytest.mark.usefixtures("staged")
def test_a_held_call_reads_what_is_written_later(tmp_path: Path) -> None:
    """Inputs are not read when they are bound."""
    program = program_of("baseline", tmp_path)
    executable = compile(program, TARGET)
    executable.begin(1, 64)
    inputs = {
        "tokens": torch.tensor([[3]]),
        "positions": torch.tensor([[1]]),
        "past": torch.tensor([1]),
        "select": torch.tensor([[0]]),
    }
    held = executable.hold("step", inputs, ("logits",))
    found = []
    for token in (3, 9, 3):
        inputs["tokens"].fill_(token)
        found.append(held()["logits"].clone())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.usefixtures("staged")
def test_sessions_read_one_copy_of_the_weights(tmp_path: Path) -> None:
    """What changes in it is there for those of all variants."""
    program = program_of("baseline", tmp_path)
    # A copy: here the device's memory is the program's own.
    embed = Weight.of("embed", program.weights["embed"].load().clone())
    program = program.replace(weights=program.weights.replacing(embed))
    executable: Any = compile(program, TARGET)
    executable.begin(1, 64)
    chain, batch = steps_of(1), steps_of(2)
    found = []
    for _ in range(2):
        for fed in (chain, batch):
            executable.begin(len(fed["past"]), 64)
            found.append(executable.run("step", fed, ("logits",))["logits"].clone())
        executable._on_device.tensors["embed"].mul_(-1)
    assert set(executable._made["step"]) == {"chain", "batch"}
    assert not torch.equal(found[0], found[2]) and not torch.equal(found[1], found[3])


def steps_of(batch: int) -> dict[str, torch.Tensor]:
    """Two tokens, after two rows where there are two texts."""
    past = 2 * (batch - 1)
    every = torch.arange(2).repeat(batch, 1)
    return {
        "tokens": every + 3,
        "positions": every + past,
        "past": torch.full((batch,), past),
        "select": every.clone(),
    }


class Thrice:
    """A session that runs as one does when a run is recorded: to warm up, recorded, launched."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: Any, how: Any) -> None:
        for _ in range(3):
            self.session.run_with_iobinding(binding, how)


@pytest.fixture
def recorded(staged: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps are recorded, and what they read of the host's memory is what it was then."""
    totals: list[Any] = []
    opened, asks = onnx_executable.open_session, OnnxExecutable._comes_again
    asked: list[bool] = []

    def asks_of(executable: OnnxExecutable, *which: Any) -> bool:
        asked.append(asks(executable, *which))
        return asked[-1]

    def opens(*args: Any, **options: Any) -> Any:
        session = opened(*args, **options)
        return Thrice(session) if asked[-1] else session

    monkeypatch.setattr(OnnxExecutable, "_comes_again", asks_of)
    monkeypatch.setattr(onnx_executable, "open_session", opens)
    records = "graftwork.backends.onnxruntime.step.records_graphs"
    monkeypatch.setattr(records, lambda session: isinstance(session, Thrice))
    counted = repeated._Binding._counted

    def noted(binding: Any, longest: int) -> Any:
        found = counted(binding, longest)
        if binding.step.records:
            totals.append((binding.step.states.capacity, int(found[TOTAL])))
        return found

    monkeypatch.setattr(repeated._Binding, "_counted", noted)
    return totals


@pytest.mark.parametrize("name", one_in(3, RECIPES))
def test_texts_are_the_same_where_steps_are_recorded(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """For as many rows as there may be, not as there are."""
    program = program_of(name, tmp_path)
    wanted = texts(program, TARGET)
    totals = request.getfixturevalue("recorded")
    assert texts(program, TARGET) == wanted
    assert totals and all(total == capacity for capacity, total in totals)


def test_parts_that_put_the_stream_back_changed_are_not_recorded(tmp_path: Path) -> None:
    """A session makes a run that is recorded more than once."""
    program = program_of("free", tmp_path)
    first, deeper, head = program.plan.step.parts
    found = [is_repeatable(program.function(name)) for name in (first, deeper, head)]
    assert found == [True, False, True]
    assert is_repeatable(program_of("baseline", tmp_path).step)


class Copies(TorchDispatchMode):
    """Counts calls that take tensors from one device to another."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        seen = {
            t.device for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)
        }
        self.count += len(seen) > 1
        return result


def test_inputs_of_a_step_are_one_copy() -> None:
    there = torch.device("meta")
    fed = steps_of(2)
    types = {name: TensorType.of(tensor) for name, tensor in fed.items()}
    staging = Staging(types, {}, there, Stream(there))
    with Copies() as copies:
        staging.upload(fed)
    assert copies.count == 1 and all(t.device == there for t in staging.bound.values())


@pytest.mark.usefixtures("staged")
def test_only_what_is_asked_for_comes_back(tmp_path: Path) -> None:
    executable: Any = compile(program_of("medusa", tmp_path), TARGET)
    executable.begin(1, 64)
    executable.run("step", steps_of(1), ("argmax",))
    (step,) = executable._made["step"].values()
    (bound,) = step.bound.values()
    assert len(bound.outputs) > 1 and list(bound.staging.results) == ["argmax"]


def test_sessions_and_moves_of_rows_have_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its own: the number of torch's first one is what ONNX Runtime takes for none."""
    given, entered = [], []

    class Made:
        cuda_stream = 4096

        def __init__(self, device: torch.device) -> None:
            entered.clear()

        def synchronize(self) -> None: ...

    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Made)
    monkeypatch.setattr(torch.cuda, "stream", within)
    stream = Stream(torch.device("cuda"))
    stream.device = torch.device("cpu")
    opened = onnx_executable.open_session

    def noted(*args: Any, **options: Any) -> Any:
        given.append(options.pop("stream"))
        return opened(*args, **options)

    monkeypatch.setattr(onnx_executable, "open_session", noted)
    monkeypatch.setattr(onnx_executable, "_stream", lambda target: stream)
    executable = compile(program_of("recycling", tmp_path), TARGET)
    executable.begin(1, 64)
    executable.run("step", steps_of(1), ("argmax",))
    entered.clear()
    executable.commit(list(executable.program.states), torch.tensor([0]), torch.tensor([[1]]))
    assert given == ["4096"] and entered == [stream._stream]
