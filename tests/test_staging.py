"""Sessions on another device, as far as a CPU can show it: memory of their own, copied to and from.

What a session reads is then never the memory that callers write, and what callers read is never the
memory that it writes, as on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from onnxruntime_helpers import without_own_attention
from selection import one_in
from staged import Poisoned, texts

from graftwork.backends import compile
from graftwork.backends.onnxruntime import executable as onnx_executable
from graftwork.backends.staging import Stream
from graftwork.backends.target import Target

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


@pytest.mark.parametrize("name", one_in(2, RECIPES))
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
    executable: Any = compile(program_of("baseline", tmp_path), TARGET)
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
