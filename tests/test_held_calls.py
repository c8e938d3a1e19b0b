"""Held calls mean what runs mean, on every backend, whatever happens to the states in between."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from onnxruntime_helpers import without_own_attention
from selection import one_in
from tiny import in_int8

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError
from graftwork.ir.execution.executable import Executable

BACKENDS = ["onnxruntime", "eager"]


def made(backend: str = "onnxruntime", trees: bool = False) -> Any:
    return compile(cached_llama(Shape(), trees=trees), Target(backend, threads=1))


def inputs(batch: int, width: int, trees: bool = False) -> dict[str, torch.Tensor]:
    """What a step of `width` columns takes, as tensors that are written before each step."""
    found = {
        "tokens": torch.zeros(batch, width, dtype=torch.int64),
        "positions": torch.zeros(batch, width, dtype=torch.int64),
        "past": torch.zeros(batch, dtype=torch.int64),
        "select": torch.arange(width).repeat(batch, 1),
    }
    if trees:
        found["ancestors"] = torch.zeros(batch, width, width, dtype=torch.bool)
    return found


def write(into: Mapping[str, torch.Tensor], past: list[int], seed: int) -> None:
    """Random tokens after `past` rows; a tree of a random shape if there are ancestors."""
    random = torch.Generator().manual_seed(seed)
    batch, width = into["tokens"].shape
    into["tokens"].copy_(torch.randint(0, 61, (batch, width), generator=random))
    into["past"].copy_(torch.tensor(past))
    seen = torch.ones(width, width, dtype=torch.bool).tril().expand(batch, width, width).clone()
    if "ancestors" in into:
        for column in range(1, width):
            parent = int(torch.randint(0, column, (1,), generator=random))
            seen[:, column] = seen[:, parent]
            seen[:, column, column] = True
        into["ancestors"].copy_(seen)
    into["positions"].copy_(torch.tensor(past)[:, None] + seen.sum(-1) - 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "trees"), [(1, False), (1, True), (3, False), (3, True)])
def test_the_same_results_as_runs(backend: str, batch: int, trees: bool) -> None:
    held, fresh = made(backend, trees), made(backend, trees)
    mine = {width: inputs(batch, width, trees and width > 1) for width in (1, 4)}
    calls = {width: held.hold("step", given, ("logits",)) for width, given in mine.items()}
    past = [0] * batch
    for executable in (held, fresh):
        executable.begin(batch, 8)
    for step in range(40):
        if step == 20:  # another generation
            past = [0] * batch
            for executable in (held, fresh):
                executable.begin(batch, 8)
        width = (4, 1, 1)[step % 3]
        write(mine[width], past, step)
        given = {name: tensor.clone() for name, tensor in mine[width].items()}
        for executable in (held, fresh):
            executable.reserve(max(past) + width)
        got = calls[width]()["logits"].clone()
        want = fresh.run("step", given, ("logits",))["logits"]
        assert torch.equal(got, want), step
        past = [rows + 1 + (width > 1) * (number % 3) for number, rows in enumerate(past)]


def test_a_bound_call_is_not_routed_and_returns_the_same_dict() -> None:
    executable = made()
    executable.begin(1, 40)
    given = inputs(1, 1)
    call = executable.hold("step", given, ("argmax",))
    write(given, [0], 0)
    first = call()
    write(given, [1], 1)
    bound = call()
    assert bound is not first and list(bound) == ["argmax"]
    for rows in range(2, 40):
        write(given, [rows], rows)
        assert call() is bound
    # The first rows of a cache may take another route.
    write(given, [0], 0)
    assert call() is not bound


@pytest.mark.parametrize("change", ["reserve", "batch"])
def test_a_call_is_made_anew_when_the_states_move(change: str) -> None:
    executable, twin = made(), made()
    given = inputs(1, 1)
    call = executable.hold("step", given, ("logits",))
    for each in (executable, twin):
        each.begin(1, 8)
    seen = []
    for rows in (1, 2, 3):
        write(given, [rows], rows)
        seen.append(call())
        twin.run("step", given, ("logits",))
    assert seen[1] is seen[2]
    for each in (executable, twin):
        if change == "reserve":
            each.reserve(each.capacity + 1)
        else:
            each.begin(2, 8)
            each.begin(1, 8)
    write(given, [4], 4)
    again = call()
    assert again is not seen[2]
    assert torch.equal(again["logits"], twin.run("step", given, ("logits",))["logits"])


def test_a_call_past_the_capacity_is_refused_as_a_run_is() -> None:
    executable = made()
    executable.begin(1, 1)
    given = inputs(1, 1)
    call = executable.hold("step", given, ("logits",))
    write(given, [executable.capacity - 1], 0)
    for _ in range(2):
        call()
    write(given, [executable.capacity], 0)
    with pytest.raises(InputError, match="call reserve"):
        call()
    executable.reserve(executable.capacity + 1)
    assert call()["logits"].shape == (1, 1, 61)


WRONG = {
    "no tokens": lambda given: given.pop("tokens"),
    "no positions": lambda given: given.pop("positions"),
    "a shape": lambda given: given.update(positions=torch.zeros(1, 3, dtype=torch.int64)),
    "a dtype": lambda given: given.update(tokens=torch.zeros(1, 1)),
    "trees": lambda given: given.update(ancestors=torch.ones(1, 1, 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_are_refused_as_a_run_refuses_them(what: str) -> None:
    executable = made()
    executable.begin(1, 8)
    given = inputs(1, 1)
    write(given, [2], 0)
    WRONG[what](given)
    with pytest.raises(InputError) as told:
        executable.run("step", given, ("logits",))
    call = executable.hold("step", given, ("logits",))
    for _ in range(2):
        with pytest.raises(InputError) as again:
            call()
        assert str(again.value) == str(told.value)


def test_a_missing_input_is_named_by_torch_too() -> None:
    executable = made("eager")
    executable.begin(1, 8)
    given = inputs(1, 1)
    del given["positions"]
    with pytest.raises(InputError, match="positions"):
        executable.hold("step", given, ("logits",))()


def test_tensors_that_are_not_contiguous_are_copied() -> None:
    executable, twin = made(), made()
    wide = inputs(1, 8)
    given = {name: t[:, ::2] if t.dim() == 2 else t for name, t in wide.items()}
    given["select"].copy_(torch.arange(4))
    call = executable.hold("step", given, ("logits",))
    for rows in (1, 2, 3):
        write(given, [rows], rows)
        for each in (executable, twin):
            each.begin(1, 32)
        plain = {name: tensor.contiguous() for name, tensor in given.items()}
        got = call()["logits"].clone()
        assert torch.equal(got, twin.run("step", plain, ("logits",))["logits"])


@pytest.mark.parametrize(
    ("shape", "widened"), [(Shape(), False), (Shape(sinks=True), True)], ids=["pairs", "widened"]
)
def test_a_lone_token_that_takes_two_columns(shape: Shape, widened: bool, monkeypatch) -> None:
    """In attention only, then a row behind the step's own is written; or all through the step."""
    without_own_attention(monkeypatch)
    program = in_int8().run(cached_llama(shape)).program
    executable, twin = (compile(program, Target(threads=1)) for _ in range(2))
    given = inputs(1, 1)
    call = executable.hold("step", given, ("logits", "argmax"))
    for each in (executable, twin):
        each.begin(1, 8)
    capacity = executable.capacity
    for rows in (*range(4), *range(capacity - 3, capacity)):
        write(given, [rows], rows)
        got = {name: tensor.clone() for name, tensor in call().items()}
        want = twin.run("step", given, ("logits", "argmax"))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert (call.binding is None) == widened
    assert executable.capacity > capacity  # the last row needed one that nobody had asked for


def test_wider_outputs_do_not_disturb_narrow_ones() -> None:
    """Outputs of all widths share memory until one does not fit."""
    executable, twin = made(), made()
    for each in (executable, twin):
        each.begin(1, 64)
    mine = {width: inputs(1, width) for width in (1, 3, 9)}
    calls = {width: executable.hold("step", given, ("logits",)) for width, given in mine.items()}
    for turn, width in enumerate((1, 3, 1, 9, 3, 1, 9)):
        write(mine[width], [3 + turn], turn)
        want = twin.run("step", mine[width], ("logits",))["logits"]
        assert torch.equal(calls[width]()["logits"], want)


@pytest.mark.parametrize("backend", one_in(2, BACKENDS))
def test_a_held_call_does_not_keep_the_executable(backend: str) -> None:
    executable: Executable = made(backend)
    executable.begin(1, 8)
    given = inputs(1, 1)
    call = executable.hold("step", given, ("logits",))
    for rows in (1, 2):
        write(given, [rows], rows)
        call()
    alive = weakref.ref(executable)
    del executable
    gc.collect()
    assert alive() is None
