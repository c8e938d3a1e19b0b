"""Outputs of steps are read where they lie."""

from __future__ import annotations

import torch
from runtime_models import program

from graftwork.runtime.feeding.outputs import Outputs, integers
from graftwork.runtime.feeding.step_inputs import Calls


class Holding:
    """Holds calls that write into `memory`, and return the dict `given`."""

    def __init__(self) -> None:
        self.program = program(4)
        self.memory = torch.zeros(2, 3, dtype=torch.int64)
        self.given = {"argmax": self.memory}
        self.held = 0

    def hold(self, function, inputs, fetch):
        self.held += 1
        assert function == "step"
        return lambda: self.given


def test_what_is_written_in_between_is_read():
    executable = Holding()
    call = Calls(("step",), {}).fetching(executable, ("argmax",))
    first = call()
    assert first.integers("argmax") == [[0, 0, 0], [0, 0, 0]]
    executable.memory.copy_(torch.arange(6).view(2, 3))
    assert call() is first and first.integers("argmax") == [[0, 1, 2], [3, 4, 5]]


def test_other_memory_is_looked_up_anew():
    executable = Holding()
    call = Calls(("step",), {}).fetching(executable, ("argmax",))
    first = call()
    first.integers("argmax")
    # A part of a wider output is not contiguous.
    executable.given = {"argmax": torch.arange(8).view(2, 4)[:, :1]}
    assert call() is not first and call().integers("argmax") == [[0], [4]]


def test_a_call_is_held_once_for_what_it_fetches():
    executable, calls = Holding(), Calls(("step",), {})
    assert calls.fetching(executable, ("argmax",)) is calls.fetching(executable, ("argmax",))
    calls.fetching(executable, ("logits", "argmax"))
    assert executable.held == 2


def test_outputs_of_runs_are_read_alike():
    plain = {"argmax": torch.tensor([[1, 2]])}
    assert integers(plain, "argmax") == integers(Outputs(plain), "argmax") == [[1, 2]]
