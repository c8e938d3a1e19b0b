"""What sessions of ONNX Runtime keep between runs is bounded, whatever is asked of them."""

from __future__ import annotations

import pytest
import torch
from handmade import Shape, cached_llama
from test_onnxruntime_executable import executable, step_of

from graftwork.backends.onnxruntime import step


def test_a_session_keeps_no_memory_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of many tokens give back what values in between took; narrow ones keep theirs."""
    program = cached_llama(Shape())
    plain, giving = executable(program), executable(program)
    took = []
    for made, wide in ((plain, 10**9), (giving, 256)):
        monkeypatch.setattr(step, "WIDE", wide)
        made.begin(8, 64)
        for width in (40, 1):
            tokens = torch.ones(8, width, dtype=torch.int64)
            inputs = {"tokens": tokens, "positions": torch.arange(width).expand(8, width)}
            past = torch.zeros(8, dtype=torch.int64)
            made.run("step", inputs | {"past": past, "select": inputs["positions"]}, ("argmax",))
        (compiled,) = made._made["step"].values()
        took.append([bound.how is not None for bound in compiled.bound.values()])
    assert took == [[False, False], [True, False]]


def test_what_is_bound_stays_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all lengths, of all sequences: what was used longest ago is forgotten, whichever
    sequence it was, and the answers are those of a session that forgets nothing."""
    program, found = cached_llama(Shape()), []
    for most in (64, 3):
        monkeypatch.setattr(step, "BOUND", most)
        whole = executable(program)
        whole.begin(2, 64)
        parts = [whole.sequences(0, 1), whole.sequences(1, 1)]
        said = []
        for width in (5, 4, 3, 2):
            for part in parts:
                said.append(part.run("step", step_of(width), ["logits"])["logits"].clone())
                said.append(parts[0].run("step", step_of(1), ["logits"])["logits"].clone())
        (own,), (other,) = (part._made["step"].values() for part in parts)
        found.append((said, [shapes[0][1] for shapes in own.bound], len(other.bound)))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1:] == ([5, 1, 4, 3, 2], 4)
    assert found[1][1:] == ([1, 2], 1)  # what comes every time stays
