"""Steps as CUDA graphs, as far as a CPU can show it: recorded once, fed in memory that stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from selection import one_in
from staged import Poisoned, texts

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.backends.torch.executable import TorchExecutable
from graftwork.backends.torch.graphs import Step

RECIPES = ["baseline", "copyspec", "recycling", "medusa", "eagle", "eagle_chain", "snapkv", "free"]
MODULE = "graftwork.backends.torch"
captures: list[int] = []


def pretended(
    step: Step, arguments: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
    """A recording that works nothing out, and launches that do so in the same memory."""
    results = [found.clone() for found in step(*map(torch.zeros_like, arguments))]
    for result in results:
        result.fill_(-1)
    captures.append(len(results))

    def launch() -> None:
        for result, found in zip(results, step(*arguments), strict=True):
            result.copy_(found)

    return results, launch


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run as they do on a GPU, on the CPU and without its compiler."""
    captures.clear()
    monkeypatch.setattr(f"{MODULE}.executable._how", lambda target: "cuda graphs")
    monkeypatch.setattr(f"{MODULE}.executable.for_gpu", lambda module: module.forward)
    monkeypatch.setattr(f"{MODULE}.graphs.capture", pretended)
    monkeypatch.setattr(f"{MODULE}.graphs.Staging", Poisoned)


@pytest.mark.parametrize("name", one_in(2, RECIPES))
def test_texts_are_the_same(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = program_of(name, tmp_path)
    wanted = texts(program, Target("eager"))
    request.getfixturevalue("on_a_gpu")
    assert texts(program, Target("torch", threads=1)) == wanted
    assert captures


def held(executable: Any, token: int, past: int) -> tuple[Any, dict[str, torch.Tensor]]:
    inputs = {
        "tokens": torch.tensor([[token]]),
        "positions": torch.tensor([[past]]),
        "past": torch.tensor([past]),
        "select": torch.tensor([[0]]),
    }
    return executable.hold("step", inputs, ("logits",)), inputs


class There(torch.Tensor):
    """What lies on a GPU, as far as it can be told: it is fetched, or stays there."""

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


@pytest.mark.usefixtures("on_a_gpu")
def test_outputs_come_to_the_host_before_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a first step are put beside those of later ones."""

    def compiled(module: torch.fx.GraphModule) -> Step:
        return lambda *given: [found.as_subclass(There) for found in module.forward(*given)]

    monkeypatch.setattr(f"{MODULE}.executable.for_gpu", compiled)
    executable = compile(program_of("baseline", tmp_path), Target("torch", threads=1))
    executable.begin(1, 64)
    _, inputs = held(executable, 3, 0)
    found = executable.run("step", inputs, ("logits", "argmax"))
    assert not any(isinstance(output, There) for output in found.values())


@pytest.mark.usefixtures("on_a_gpu")
def test_a_step_is_recorded_once_for_all_generations(tmp_path: Path) -> None:
    executable = compile(program_of("baseline", tmp_path), Target("torch", threads=1))
    assert isinstance(executable, TorchExecutable)
    for _ in range(3):
        executable.begin(1, 64)
        call, inputs = held(executable, 3, 0)
        for past in range(4):
            inputs["past"].fill_(past)
            call()
    assert len(captures) == 1


@pytest.mark.usefixtures("on_a_gpu")
def test_caches_that_move_are_recorded_anew(tmp_path: Path) -> None:
    executable = compile(program_of("baseline", tmp_path), Target("torch", threads=1))
    executable.begin(1, 64)
    call, _ = held(executable, 3, 0)
    first = [call()["logits"].clone() for _ in range(3)][-1]
    executable.begin(2, 64)  # another size
    executable.begin(1, 64)
    assert torch.equal([call()["logits"].clone() for _ in range(3)][-1], first)
    assert len(captures) == 2
