"""What a function returns for a state is written, whatever it is made by; states that are alike
lie together, and no compiler sees that they do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from torch.utils._python_dispatch import TorchDispatchMode

from graftwork.backends import Target, compile, states
from graftwork.backends.torch.emit import emit
from graftwork.ir import (
    SOURCE,
    Function,
    ModelInfo,
    Program,
    State,
    Sym,
    TensorType,
    WeightStore,
    run,
)

A, G = torch.ops.aten, torch.ops.graftwork
ROWS = TensorType(torch.float32, (Sym("B"), 1, Sym("C"), 2))
STATES = ("a", "b")


def step() -> tuple[Function, dict[str, torch.fx.Node]]:
    fn = Function("step")
    types = {"a": ROWS, "b": ROWS, "x": TensorType.parse("f32[B,1,T,2]")}
    types["past"] = TensorType.parse("i64[B]")
    return fn, {name: fn.add_input(name, type) for name, type in types.items()}


def _write(fn, given, state="a"):
    return fn.call(G.cache_write.default, given[state], given["x"], given["past"])


def _read_after(fn, given):
    write = _write(fn, given)
    return {"y": fn.call(A.add.Tensor, write, given["a"]), "a": write}


def _computed(fn, given):
    return {"y": fn.call(A.neg.default, given["a"]), "a": fn.call(A.add.Tensor, given["a"], 1.0)}


def _exchanged(fn, given):
    return {"y": fn.call(A.neg.default, given["x"]), "a": given["b"], "b": given["a"]}


def _one_value_twice(fn, given):
    write = _write(fn, given)
    return {"y": fn.call(A.neg.default, given["x"]), "a": write, "b": write}


def _other_state(fn, given):
    return {"y": fn.call(A.neg.default, given["b"]), "b": _write(fn, given)}


def _seen_before(fn, given):
    shape = [Sym("B"), Sym("C"), 2]
    return {"y": fn.call(A.reshape.default, given["a"], shape), "a": given["b"]}


CASES = (_read_after, _computed, _exchanged, _one_value_twice, _other_state, _seen_before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[1:])
def test_states_hold_what_the_function_returns(case):
    fn, given = step()
    fn.set_outputs(case(fn, given))
    values = {name: torch.randn(2, 1, 5, 2) for name in STATES}
    values |= {"x": torch.randn(2, 1, 3, 2), "past": torch.tensor([0, 2])}
    program = Program("p", {"step": fn}, WeightStore(), ModelInfo("m", 8, 8))
    want = run(program, "step", values)
    held = {name: value.clone() for name, value in values.items()}
    (y,) = emit(fn, {}, STATES, ("y",))(*held.values())
    torch.testing.assert_close(y, want["y"])
    for name in STATES:
        torch.testing.assert_close(held[name], want.get(name, values[name]))


class Ran(TorchDispatchMode):
    """Counts the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Any] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops[op] += 1
        return op(*args, **(kwargs or {}))


def executable(layers: int = 4) -> Any:
    made = compile(cached_llama(Shape(layers=layers)), Target("eager", threads=1))
    made.begin(2, 8)
    return made


def of_text(made: Any) -> dict[str, torch.Tensor]:
    """The states that hold rows of texts."""
    return {name: made.states[name] for name in made.program.states_of("step")}


def fill(made: Any) -> dict[str, torch.Tensor]:
    for state in of_text(made).values():
        state.copy_(torch.randn_like(state))
    return {name: state.clone() for name, state in of_text(made).items()}


def test_rows_of_all_states_are_moved_by_one_op() -> None:
    made = executable()
    before = fill(made)
    with Ran() as ran:
        made.commit(list(made.states), torch.tensor([3, 0]), torch.tensor([[0, 2, 4], [0, 1, 2]]))
    assert len(before) == 8
    assert ran.ops[A.index_select.default] == 1  # of the one sequence whose rows move
    for name, state in of_text(made).items():
        rows = [*range(3), 3, 5, 7]
        torch.testing.assert_close(state[0, :, :6], before[name][0, :, rows])
        torch.testing.assert_close(state[1], before[name][1])


def test_no_state_is_a_view() -> None:
    made = executable()
    for state in of_text(made).values():
        assert state._base is None and state.storage_offset() == 0 and state.is_contiguous()
        assert state.untyped_storage().nbytes() < state.nbytes + 64
        assert state.data_ptr() % 64 == 0


def test_states_begin_aligned_whatever_their_size() -> None:
    types = {name: TensorType(torch.uint8, (Sym("B"), 1, Sym("C"), 3)) for name in STATES}
    fn = Function("step")
    for name, type in types.items():
        fn.add_input(name, type)
    held = {name: State(name, type, 0, name) for name, type in types.items()}
    program = Program("p", {"step": fn}, WeightStore(), ModelInfo("m", 8, 8), states=held)
    buffers = states.StateBuffers(program, torch.device("cpu"), 8, lambda rows: rows)
    buffers.begin(1, 7, anew=True)
    assert len(buffers.groups) == 1 and buffers.nbytes() == 2 * 7 * 3
    assert all(tensor.data_ptr() % 64 == 0 for tensor in buffers.tensors.values())


def test_large_states_are_replaced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there would be twice the memory for as long as their rows are copied."""
    monkeypatch.setattr(states, "_SMALL", 1)
    made = executable(layers=6)
    groups = made.buffers.groups
    held = [len(group.names) for group in groups if group.symbol != SOURCE]
    assert held == [2] * 6  # eight parts at most
    before, most = fill(made), taken(made, monkeypatch)
    made.reserve(300)
    assert len(most) == 6 and max(most) < 1.2 * made.state_bytes()
    for name, old in before.items():
        torch.testing.assert_close(made.states[name][:, :, : old.shape[2]], old)


def taken(made: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that states take while they grow, old ones and new; it is filled as they do."""
    sizes: list[int] = []
    zeros = made.buffers._zeros

    def counted(count: int, room: int) -> torch.Tensor:
        sizes.append(made.state_bytes() + count * room)
        return zeros(count, room)

    monkeypatch.setattr(made.buffers, "_zeros", counted)
    return sizes
