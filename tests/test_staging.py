"""Sessions on another device, as far as a CPU can show it: memory of their own, copied to and from.

What a session reads is then never the memory that callers write, and what callers read is never the
memory that it writes, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from onnxruntime_helpers import without_own_attention
from tiny import MASK, PROMPTS

from graftwork.backends import compile
from graftwork.backends.onnxruntime import executable as onnx_executable
from graftwork.backends.staging import Staging, Stream
from graftwork.backends.target import Target
from graftwork.ir import Program
from graftwork.runtime import generate

ASKED: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": []}
RECIPES = ["baseline", "copyspec", "recycling", "medusa", "eagle", "eagle_chain", "snapkv", "free"]


class Poisoned(Staging):
    """Outputs are gone once they were asked for, and inputs once the session has run."""

    def upload(self, inputs: Any) -> None:
        super().upload(inputs)
        self.host.fill_(0xFF)

    def download(self, fetch: Collection[str]) -> dict[str, torch.Tensor]:
        found = super().download(fetch)
        for output in self.outputs.values():
            output.fill_(-1)
        return found


@pytest.fixture(autouse=True)
def _kernels_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graftwork's own are the CPU's."""
    without_own_attention(monkeypatch)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executables are made as if the CPU were another device."""
    monkeypatch.setattr(onnx_executable, "_stream", lambda target: Stream(torch.device("cpu")))
    monkeypatch.setattr("graftwork.backends.onnxruntime.step.Staging", Poisoned)


def texts(program: Program) -> list[Any]:
    """A batch, one text, and one that goes on from it."""
    executable = compile(program, Target(threads=1))
    many = generate(executable, PROMPTS, attention_mask=MASK, **ASKED)
    one = generate(executable, PROMPTS[2:3], **ASKED)
    longer = generate(executable, one, **ASKED)
    sampled = generate(executable, PROMPTS[2:3], **{**ASKED, "do_sample": True, "seed": 3})
    return [found.tolist() for found in (many, one, longer, sampled)]


@pytest.mark.parametrize("name", RECIPES)
def test_texts_are_the_same(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = program_of(name, tmp_path)
    wanted = texts(program)
    request.getfixturevalue("staged")
    assert texts(program) == wanted


@pytest.mark.usefixtures("staged")
def test_a_held_call_reads_what_is_written_later(tmp_path: Path) -> None:
    """Inputs are not read when they are bound."""
    program = program_of("baseline", tmp_path)
    executable = compile(program, Target(threads=1))
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
