"""Held calls of compiled steps run their kernels alone, and mean what runs mean."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import cached_llama

from graftwork.backends import Target, compile
from graftwork.backends.torch import native, replay
from graftwork.backends.torch.compiled import inductor
from graftwork.backends.torch.replay import Replay, kernels, record
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_top_tokens import AddTopTokens

CONTEXT = 256


@pytest.fixture(scope="module")
def program():
    return cached_llama(context=CONTEXT)


def fed(width: int) -> dict[str, torch.Tensor]:
    """What a step of `width` tokens takes, as tensors that are written before each step."""
    every = torch.arange(width)[None].clone()
    return {
        "tokens": every.clone(),
        "positions": every.clone(),
        "past": torch.zeros(1, dtype=torch.int64),
        "select": every,
    }


def write(into: dict[str, torch.Tensor], past: int) -> None:
    """Tokens that depend on the place, after `past` rows."""
    width = into["tokens"].shape[1]
    into["positions"].copy_(torch.arange(past, past + width)[None])
    into["tokens"].copy_((into["positions"] * 7 + past) % 32)
    into["past"].fill_(past)


@pytest.mark.long
def test_steps_are_replayed_through_growth_new_generations_and_other_threads(program):
    threads = torch.get_num_threads()
    held, fresh = (compile(program, Target.parse("torch")) for _ in range(2))
    given = fed(1)
    call = held.hold("step", given, ("logits", "argmax"))
    replayed = []
    try:
        for tokens, used in ((90, 2), (70, 2), (5, 1), (5, 2)):
            torch.set_num_threads(used)
            for executable in (held, fresh):
                executable.begin(1, 8)
            for past in range(tokens):
                for executable in (held, fresh):
                    executable.reserve(past + 1)
                write(given, past)
                got = call()
                want = fresh.run("step", given, ("logits", "argmax"))
                assert torch.equal(got["logits"], want["logits"]), (tokens, past)
                assert torch.equal(got["argmax"], want["argmax"]), (tokens, past)
                replayed.append(call.replay is not None)
            for name, state in held.states.items():
                assert torch.equal(state, fresh.states[name])
    finally:
        torch.set_num_threads(threads)
    # Compiled, recorded; recorded once more where the caches have grown to 128 rows; and for
    # another number of threads compiled and recorded.
    assert [step for step, done in enumerate(replayed) if not done] == [0, 1, 64, 160, 161]


@pytest.mark.long
def test_a_step_that_returns_its_best_tokens_is_replayed(program):
    """A tree's step, too: what drafts are made of is a kernel like the others."""
    passes = (AddTopTokens(), AcceptTrees())
    made = run_passes(program, [Step(p) for p in passes])[0]
    executable = compile(made, Target.parse("torch"))
    executable.begin(1, 8)
    given = {**fed(4), "ancestors": torch.ones(1, 4, 4, dtype=torch.bool).tril()}
    call, fetch = executable.hold("step", given, ("argmax", "top_tokens")), ("argmax", "top_tokens")
    for past in (0, 4, 8):
        write(given, past)
        got = {name: tensor.clone() for name, tensor in call().items()}
        want = executable.run("step", given, fetch)
        assert all(torch.equal(got[name], want[name]) for name in fetch)
    assert call.replay is not None


def test_caches_of_the_last_text_stay_where_they_are_unless_they_are_much_too_large(program):
    """So what is recorded is replayed in the next text, too."""
    executable = compile(program, Target.parse("torch"))
    executable.begin(1, 100)
    executable.reserve(100)
    epoch, capacity = executable.buffers.epoch, executable.capacity
    executable.begin(1, 64)
    assert (executable.buffers.epoch, executable.capacity) == (epoch, capacity) and capacity > 64
    executable.reserve(500)
    executable.begin(1, 100)
    assert executable.capacity == 64 and executable.buffers.epoch > epoch


@pytest.mark.long
def test_outputs_stay_in_their_place(program):
    executable = compile(program, Target.parse("torch"))
    executable.begin(1, 8)
    given = fed(1)
    call = executable.hold("step", given, ("logits", "argmax"))
    seen = []
    for past in range(5):
        write(given, past)
        seen.append(call())
    assert seen[2] is seen[3] is seen[4] and seen[1] is not seen[2]
    assert seen[4]["argmax"].item() == seen[4]["logits"].argmax().item()


def test_the_kernels_of_compiled_code_are_found():
    """Nothing public tells of them: this fails where a new torch keeps them elsewhere."""
    step = inductor(torch.fx.symbolic_trace(_Sum()))
    before = len(kernels())
    assert torch.equal(step(torch.ones(4, 8))[0], torch.full((4,), 8.0))
    assert len(kernels()) == before + 1


class _Sum(torch.nn.Module):
    def forward(self, x):
        return (x.sum(-1),)


class _Library(torch.nn.Module):
    """A product of a library between two kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Buffer(torch.randn(64, 64))

    def forward(self, x):
        return (((x + 1) @ self.weight).cos(),)


class _Counter(torch.nn.Module):
    """A state that each run changes further, returned, too."""

    def forward(self, x, state):
        state.mul_(2).add_(x)
        return (state.sum(-1), state + x)


@pytest.mark.long
def test_what_is_more_than_kernels_is_not_replayed():
    step = inductor(torch.fx.symbolic_trace(_Library()))
    x = torch.randn(64, 64)
    want = step(x)[0].clone()
    results, recording = record(step, [x], [])
    assert torch.equal(results[0], want) and recording is None


class _Sorted(torch.nn.Module):
    """Whole numbers that a library works out decide what a kernel returns."""

    def forward(self, x, numbers):
        return (torch.where(torch.sort(numbers).values < 0, x + 1, x - 1),)


def test_what_a_library_writes_is_not_taken_from_scratch():
    step = inductor(torch.fx.symbolic_trace(_Sorted()))
    x, numbers = torch.randn(40), torch.full((40,), -5)
    step(x, numbers)
    # Scratch that nobody wrote is less than 0, too.
    results, recording = record(step, [x, numbers], [])
    assert torch.equal(results[0], x + 1)
    assert recording is None


def test_a_recording_runs_a_step_once_and_can_be_bound_to_other_memory():
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    x, state = torch.ones(4, 40), torch.ones(4, 40)
    step(x, torch.zeros(4, 40))
    results, recording = record(step, [x, state], [state])
    assert recording is not None
    # Twice its value and one more: the trial of the recording left no trace.
    assert torch.equal(state, torch.full((4, 40), 3.0))
    assert torch.equal(results[1], torch.full((4, 40), 4.0))
    for one, two in ((x, state), (torch.randn(4, 40), torch.randn(4, 40))):
        twin = two.clone()
        again = Replay(recording, [one, two])
        for _ in range(3):
            again()
            want = step(one, twin)
            assert torch.equal(two, twin)
            assert all(map(torch.equal, again.results, want))


def test_arguments_may_lie_anywhere_in_their_memory_but_not_in_the_same():
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    many = torch.randn(16, 4, 40)
    step(many[0], many[1].clone())
    _, recording = record(step, [many[3], many[5]], [many[5]])
    assert recording is not None
    for one, two in ((many[7], many[9]), (torch.randn(4, 40), many[2]), (many[4], many[4].clone())):
        twin = two.clone()
        again = Replay(recording, [one, two])
        again()
        want = step(one, twin)
        assert torch.equal(two, twin) and all(map(torch.equal, again.results, want))
    _, recording = record(step, [many[11], many[11]], [many[11]])
    assert recording is None


def test_a_recording_that_does_not_repeat_the_step_is_dropped(monkeypatch: pytest.MonkeyPatch):
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    x, state = torch.ones(4, 40), torch.ones(4, 40)
    step(x, torch.zeros(4, 40))
    placed = replay._placed

    def forgetful(*arguments):
        found = placed(*arguments)
        found.calls.pop()
        return found

    monkeypatch.setattr(replay, "_placed", forgetful)
    results, recording = record(step, [x, state], [state])
    assert recording is None
    assert torch.equal(state, torch.full((4, 40), 3.0))
    assert torch.equal(results[1], torch.full((4, 40), 4.0))


def test_calls_that_cannot_be_made_from_their_addresses_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
):
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    x, state = torch.ones(4, 40), torch.ones(4, 40)
    step(x, torch.zeros(4, 40))
    _, recording = record(step, [x, state], [state])
    assert recording is not None
    monkeypatch.setattr(native, "most_arguments", lambda: 1)
    _, recording = record(step, [x, state], [state])
    assert recording is None
    assert not replay._runs(print, [1, 0.5]) and replay._runs(print, [1])


def test_large_states_are_not_copied(monkeypatch: pytest.MonkeyPatch):
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    x, state = torch.ones(4, 40), torch.ones(4, 40)
    step(x, torch.zeros(4, 40))
    monkeypatch.setattr(replay, "COPIED", state.nbytes - 1)
    results, recording = record(step, [x, state], [state])
    assert recording is None and torch.equal(results[1], torch.full((4, 40), 4.0))


def test_what_other_threads_run_is_not_recorded():
    step = inductor(torch.fx.symbolic_trace(_Counter()))
    x, state = torch.ones(4, 40), torch.ones(4, 40)
    step(x, state)

    def beside(*arguments):
        other = threading.Thread(target=step, args=(torch.ones(4, 40), torch.ones(4, 40)))
        other.start()
        other.join()
        return step(*arguments)

    with replay._kernel_calls() as seen:
        step(x, state)
    alone = len(seen)
    with replay._kernel_calls() as seen:
        beside(x, state)
    assert alone == len(seen) >= 1
