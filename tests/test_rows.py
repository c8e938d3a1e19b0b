"""Rows are not positions: classes of states with room of their own, and rows that are given up.

What is compared with is computed without any of it: the same program with one cache of all rows,
in which a mask hides what was given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from handmade import Shape, cached_llama
from selection import one_in

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, Program, Sym, TensorType, parse_program, program_text, verify
from graftwork.ir.plan import (
    CacheRecord,
    DecodePlan,
    DraftRecord,
    FirstDraft,
    GoodputLength,
    NoDraft,
    record,
)
from graftwork.ir.program import State
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime import generate
from graftwork.runtime.asking.text import Text
from graftwork.runtime.cache import CACHES, CachePolicy
from graftwork.runtime.speculate.lengths.goodput import GoodputPolicy

G = torch.ops.graftwork
BACKENDS = ["eager", "onnxruntime", pytest.param("torch", marks=pytest.mark.long)]
SMALL = Shape(layers=2, context=256)
SINKS, WINDOW, CHUNK = 4, 12, 8


def executable_of(program: Program, backend: str) -> Any:
    return compile(program, Target(backend, threads=1))


def with_own_capacity(program: Program, layer: int, symbol: str) -> Program:
    """The program with the states of one layer in a class of their own."""
    fn = program.function("step").copy()
    states = dict(program.states)
    for name, state in program.states.items():
        if state.layer == layer:
            dims = tuple(Sym(symbol) if dim == Sym("C") else dim for dim in state.type.dims)
            states[name] = State(name, TensorType(state.type.dtype, dims), layer, state.part)
            fn.input(name).meta["type"] = states[name].type
            attend = next(
                user
                for write in fn.input(name).users
                for user in write.users
                if user.op != "output"
            )
    mask = attend.args[3]
    with fn.graph.inserting_before(mask):
        own = [Sym(symbol) if arg == Sym("C") else arg for arg in mask.args]
        attend.update_arg(3, fn.call(G.step_mask.default, *own))
    fn.retype()
    made = program.with_function(fn, states=states)
    verify(made)
    return made


def step_inputs(
    tokens: Sequence[Sequence[int]],
    past: int,
    start: int,
    parents: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """What a step takes of equally long chains, or of trees of which column 0 is the root."""
    batch, width = len(tokens), len(tokens[0])
    seen = torch.ones(width, width, dtype=torch.bool).tril()
    if parents is not None:
        seen = torch.eye(width, dtype=torch.bool)
        for column, parent in enumerate(parents, 1):
            seen[column] |= seen[parent]
    found = {
        "tokens": torch.tensor(tokens),
        "positions": (start + seen.sum(-1) - 1).expand(batch, width).contiguous(),
        "past": torch.full((batch,), past),
        "select": torch.arange(width).repeat(batch, 1),
    }
    if parents is not None:
        found["ancestors"] = seen.expand(batch, width, width).contiguous()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_with_its_own_capacity(backend: str) -> None:
    """It reads back, prints, runs as before, and grows by itself."""
    plain = cached_llama(SMALL)
    program = with_own_capacity(plain, 1, "C.1")
    assert program_text(parse_program(program_text(program), weights=program.weights)) == (
        program_text(program)
    )
    ids = torch.randint(2, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": []}
    executable = executable_of(program, backend)
    assert torch.equal(
        generate(executable, ids, **asked), generate(executable_of(plain, "eager"), ids, **asked)
    )
    before = dict(executable.buffers.capacities)
    executable.reserve(before["C.1"] + 1, "C.1")
    after = executable.buffers.capacities
    assert after["C"] == before["C"] and after["C.1"] > before["C.1"]
    assert executable.capacity == before["C"]
    inputs = step_inputs(ids[:, :4].tolist(), 0, 0)
    again = executable.run("step", inputs, ("logits",))["logits"].clone()
    reference = executable_of(plain, "eager")
    reference.begin(2, 64)
    torch.testing.assert_close(
        again, reference.run("step", inputs, ("logits",))["logits"], atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "dims", ["f32[B,2,Q,16]", "f32[B,2,C,C.1]", "f32[B,C,C,16]", "f32[B,C + 1]"]
)
def test_a_size_that_nobody_would_know_is_refused(dims: str) -> None:
    with pytest.raises(InputError, match=r"kv\.0\.key: expected .* capacity \(C, C.1"):
        State("kv.0.key", TensorType.parse(dims), 0, "key")


def hiding(program: Program) -> Program:
    """The program with an input ``visible`` bool[B,1,T,C] that every mask is narrowed by."""
    fn = program.function("step").copy()
    visible = fn.add_input("visible", TensorType.parse("bool[B,1,T,C]"))
    for mask in fn.calls(G.step_mask.default):
        users = list(mask.users)
        with fn.graph.inserting_after(mask):
            both = fn.call(torch.ops.aten.logical_and.default, mask, visible)
        for user in users:
            user.replace_input_with(mask, both)
    return program.with_function(fn)


class Reference:
    """Every row for good, and a mask over those that were given up."""

    def __init__(self, program: Program, batch: int) -> None:
        self.executable = executable_of(hiding(program), "eager")
        self.executable.begin(batch, 256)
        self.executable.reserve(256)
        self.given_up: set[int] = set()

    def run(self, inputs: dict[str, torch.Tensor], row: int) -> torch.Tensor:
        """Logits of a step whose rows begin at `row`, which is its first position."""
        batch, width = inputs["tokens"].shape
        visible = torch.ones(batch, 1, width, self.executable.capacity, dtype=torch.bool)
        visible[..., sorted(self.given_up)] = False
        given = {**inputs, "past": torch.full((batch,), row), "visible": visible}
        logits: torch.Tensor = self.executable.run("step", given, ("logits",))["logits"]
        return logits


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_and_a_window_by_hand(backend: str, batch: int) -> None:
    """StreamingLLM with the positions of the text (Xiao et al. 2024): between steps all rows but
    the first ones and the last ones are given up; then a tree, a path of it, and a token after."""
    if backend == "torch" and batch == 2:
        pytest.skip("compiled for one sequence: the rows are moved by the same code")
    program = cached_llama(SMALL)
    executable, reference = executable_of(program, backend), Reference(program, batch)
    executable.begin(batch, SINKS + WINDOW + CHUNK)
    random = torch.Generator().manual_seed(1)
    draw = lambda width: torch.randint(2, 61, (batch, width), generator=random).tolist()  # noqa: E731
    states, rows, position = list(program.states), 0, 0

    def both(inputs: dict[str, torch.Tensor]) -> None:
        executable.reserve(rows + inputs["tokens"].shape[1])
        found = executable.run("step", inputs, ("logits",))["logits"]
        wanted = reference.run(inputs, position)
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))

    def give_up() -> None:
        """Keep sinks and window."""
        nonlocal rows
        kept = [*range(SINKS), *range(rows - WINDOW, rows)]
        dropped = range(position - rows + SINKS, position - WINDOW)
        reference.given_up |= set(dropped) | set(range(SINKS, position - WINDOW))
        executable.compact(states, torch.tensor([kept] * batch))
        rows = len(kept)

    for _ in range(6):
        both(step_inputs(draw(CHUNK), rows, position))
        rows, position = rows + CHUNK, position + CHUNK
        if rows >= SINKS + WINDOW + CHUNK:
            give_up()
    assert rows == SINKS + WINDOW < position
    # The root, two children, and a child of each.
    both(step_inputs(draw(5), rows, position, parents=[0, 0, 1, 2]))
    source = torch.tensor([[0, 2, 4]] * batch)
    executable.commit(states, torch.full((batch,), rows), source)
    reference.executable.commit(states, torch.full((batch,), position), source)
    rows, position = rows + 3, position + 3
    both(step_inputs(draw(1), rows, position))
    give_up()
    both(step_inputs(draw(1), rows, position))


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_rows_are_read_and_written(backend: str) -> None:
    """What one executable made of a text another goes on from; other rows stay as they are."""
    program = cached_llama(SMALL)
    first, second = executable_of(program, backend), executable_of(program, backend)
    text = torch.randint(2, 61, (1, 12), generator=torch.Generator().manual_seed(2)).tolist()
    for executable, batch in ((first, 1), (second, 2)):
        executable.begin(batch, 32)
    first.run("step", step_inputs(text, 0, 0), ())
    second.run("step", step_inputs([[5] * 12] * 2, 0, 0), ())
    before = second.read_rows(list(program.states), 0, 0, 12)
    kept = first.read_rows(list(program.states), 0, 0, 12)
    assert kept["kv.0.key"].shape == (2, 12, 16)
    second.write_rows(1, 0, kept)
    after = second.read_rows(list(program.states), 0, 0, 12)
    assert all(torch.equal(before[name], after[name]) for name in before)
    one = first.run("step", step_inputs([[7]], 12, 12), ("logits",))["logits"][0].clone()
    two = second.run("step", step_inputs([[7], [7]], 12, 12), ("logits",))["logits"][1]
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_rows_that_are_not_there_are_refused() -> None:
    program = cached_llama(SMALL)
    executable = executable_of(program, "eager")
    executable.begin(1, 8)
    states = list(program.states)
    with pytest.raises(InputError, match="of sequence 1: there are 1 sequences"):
        executable.read_rows(states, 1, 0, 4)
    with pytest.raises(InputError, match="rows 0 to 9999"):
        executable.read_rows(states, 0, 0, 9999)
    rows = executable.read_rows(states, 0, 0, 4)
    with pytest.raises(InputError, match=r"kv.0.key: expected f32\[2,4,16\], got f64"):
        executable.write_rows(0, 0, {"kv.0.key": rows["kv.0.key"].double()})
    with pytest.raises(InputError, match=r"no state with rows is called kv\.9"):
        executable.write_rows(0, 0, {"kv.9.key": rows["kv.0.key"]})
    with pytest.raises(InputError, match=r"no state has the capacity C.7"):
        executable.reserve(9, "C.7")


@record
@dataclass(frozen=True)
class SinksAndWindow(CacheRecord):
    """Keep the first rows and the last ones, each time that `CHUNK` more have come."""

    kind: ClassVar[str] = "test_sinks"


@CACHES.register(SinksAndWindow)
class SinksAndWindowPolicy(CachePolicy):
    most = SINKS + WINDOW + CHUNK

    def room(self, rows: Sequence[int]) -> int:
        return SINKS + WINDOW + CHUNK - max(rows)

    def settle(self, texts: Sequence[Text]) -> None:
        full = [text.rows == SINKS + WINDOW + CHUNK for text in texts]
        if not any(full):
            return
        end = SINKS + WINDOW + CHUNK
        kept = [*range(SINKS), *range(end - WINDOW, end)]
        every = [kept if one else list(range(len(kept))) for one in full]
        self.executable.compact(list(self.executable.program.states), torch.tensor(every))
        for text, one in zip(texts, full, strict=True):
            text.rows -= CHUNK if one else 0


def streamed(program: Program, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding token by token, rows given up by hand."""
    executable = executable_of(program, "eager")
    executable.begin(1, SINKS + WINDOW + CHUNK)
    text, rows, end = list(prompt), 0, SINKS + WINDOW + CHUNK
    for at in range(len(prompt) + count - 1):
        if rows == end:
            kept = [*range(SINKS), *range(rows - WINDOW, rows)]
            executable.compact(list(program.states), torch.tensor([kept]))
            rows = len(kept)
        best = executable.run("step", step_inputs([[text[at]]], rows, at), ("argmax",))["argmax"]
        rows += 1
        if at + 1 == len(text):
            text.append(int(best))
    return text


@pytest.mark.parametrize(
    ("draft", "backend"),
    one_in(2, product([SuffixDraft(tokens=5), RecyclingDraft(nodes=6), NoDraft()], BACKENDS[:2])),
)
def test_a_policy_that_gives_rows_up_decodes_as_by_hand(backend: str, draft: DraftRecord) -> None:
    """A step never crosses a boundary, so drafts change nothing: alone, and in a ragged batch whose
    sequences come to theirs at different times."""
    program = AddTopTokens().run(cached_llama(SMALL)).program
    program = program.replace(plan=DecodePlan(draft=draft, cache=SinksAndWindow()))
    executable = executable_of(program, backend)
    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 9, (n,), generator=random).tolist() for n in (45, 7, 30)]
    wanted = [streamed(program, prompt, 60) for prompt in prompts]
    asked: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": [], "pad_token_id": 0}
    alone = generate(executable, torch.tensor([prompts[0]]), **asked)
    assert alone.tolist() == wanted[:1]
    ids = torch.tensor([[0] * (45 - len(prompt)) + prompt for prompt in prompts])
    found = generate(executable, ids, attention_mask=(ids != 0).long(), **asked)
    assert [row[45 - len(p) :] for row, p in zip(found.tolist(), prompts, strict=True)] == wanted
    # In steps of 64 rows, or of 256.
    assert executable.capacity == (64 if backend == "onnxruntime" else 256)


@pytest.mark.measured
def test_a_rest_ends_where_the_policy_must_have_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length policy that wants no drafts for longer than there are rows to fill."""
    monkeypatch.setattr(GoodputPolicy, "rest", lambda self: 1000)
    program = cached_llama(SMALL)
    copied = FirstDraft((SuffixDraft(tokens=5), SuffixDraft(tokens=4)))
    plan = DecodePlan(draft=copied, length=GoodputLength(), cache=SinksAndWindow())
    program = program.replace(plan=plan)
    prompt = torch.randint(2, 9, (45,), generator=torch.Generator().manual_seed(3)).tolist()
    asked: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": []}
    found = generate(executable_of(program, "eager"), torch.tensor([prompt]), **asked)
    assert found.tolist() == [streamed(program, prompt, 60)]
