"""Plain decoding has steps of its own: they do what the general loop does, and are taken."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import Recorder, TableExecutable, plain, program, whole
from selection import mostly_long, one_in

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError
from graftwork.ir.execution.executable import Planned
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.runtime import generate
from graftwork.runtime.rounds.chained import ChainedRound
from graftwork.runtime.rounds.general import GeneralRound
from graftwork.runtime.rounds.plain import PlainRound, RestingRound

VOCAB = 11


@pytest.fixture
def never_general(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a general step")

    for other in (GeneralRound, ChainedRound):
        monkeypatch.setattr(other, "run", refuse)


def decoded(make: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """What a generation returns, streams, counts and feeds."""
    executable, recorder = make(), Recorder()
    options |= {"streamer": recorder, "return_dict_in_generate": True, "pad_token_id": 0}
    result = generate(executable, ids, attention_mask=torch.ones_like(ids), **options)
    counts = {k: v for k, v in result.stats.to_dict().items() if isinstance(v, int)}
    fed = getattr(executable, "fed", None)
    return result.sequences.tolist(), recorder.streamed(), counts, fed


@settings(deadline=None, max_examples=80)
@given(
    prompts=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=5, max_size=5), min_size=1, max_size=4
    ),
    widths=st.sampled_from([None, (1, 4), (1, 3, 40)]),
    count=st.integers(1, 20),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=2),
    roomy=st.booleans(),
    selects=st.booleans(),
    spare=st.integers(0, 9),
)
def test_as_the_general_loop(prompts, widths, count, eos, roomy, selects, spare):
    """The same tokens, streamed alike, the same counts, and the same steps: caches that grow step
    by step, a context that ends with the text, ends at different places."""
    inputs = ("tokens", "positions", "past", *(["select"] if selects else []))
    model = program(VOCAB, context=max(5 + count + spare, 8), inputs=inputs)
    rule = whole(VOCAB)

    def run() -> tuple[Any, ...]:
        make = lambda: TableExecutable(rule, model, widths, roomy)  # noqa: E731
        return decoded(make, torch.tensor(prompts), max_new_tokens=count, eos_token_id=eos)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainRound, "fits", lambda *_: False)
        patch.setattr(RestingRound, "fits", lambda *_: False)
        want = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneralRound, "run", None)
        assert run() == want
    if not eos:
        found = [row[5:] for row in want[0]]
        assert found == [plain(rule, prompt, count) for prompt in prompts]


class Tight(Planned):
    """An executable that makes room for a row and no more until it is told to."""

    def begin(self, batch: int, rows: int) -> None:
        self.executable.begin(batch, 1)


@pytest.mark.parametrize(("backend", "batch"), one_in(3, product(["onnxruntime", "eager"], [1, 3])))
def test_on_every_backend(backend: str, batch: int, never_general: None) -> None:
    """Caches grow on the way, so held calls are made anew."""
    model = cached_llama(Shape(context=400))
    ids = torch.randint(0, 61, (batch, 7), generator=torch.Generator().manual_seed(1))
    executable = compile(model, Target(backend, threads=1))
    tight = Tight(executable, model.plan)
    grown = generate(tight, ids, max_new_tokens=300, eos_token_id=[])
    assert grown.tolist() == plainly(executable, ids, 300)


def plainly(executable: Any, ids: torch.Tensor, count: int) -> list[list[int]]:
    """Greedy decoding by nothing but runs of one token."""
    executable.begin(len(ids), ids.shape[1] + count)
    rows: list[list[int]] = ids.tolist()
    for at in range(ids.shape[1] + count - 1):
        executable.reserve(at + 1)
        past = torch.full((len(rows),), at)
        inputs = {
            "tokens": torch.tensor([[row[at]] for row in rows]),
            "positions": past[:, None],
            "past": past,
            "select": torch.zeros(len(rows), 1, dtype=torch.int64),
        }
        best = executable.run("step", inputs, ("argmax",))["argmax"].tolist()
        if at + 1 >= ids.shape[1]:
            for row, (token,) in zip(rows, best, strict=True):
                row.append(token)
    return rows


PLAIN = [{}, {"eos_token_id": 3}, {"max_new_tokens": 1}, {"streamer": Recorder()}]
GENERAL = [
    {"do_sample": True, "seed": 0},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 4},
    {"stop": [[1, 2]]},
    {"stopping_criteria": lambda ids, scores: False},
]


@pytest.mark.parametrize("options", PLAIN)
def test_taken_where_a_step_is_an_argmax(options: Any, never_general: None) -> None:
    generate(TableExecutable(whole(VOCAB), program(VOCAB)), torch.tensor([[1, 2]]), **options)


@pytest.mark.parametrize("options", GENERAL)
def test_not_taken_where_more_is_asked(options: Any, never_general: None) -> None:
    with pytest.raises(AssertionError, match="a general step"):
        generate(TableExecutable(whole(VOCAB), program(VOCAB)), torch.tensor([[1, 2]]), **options)


@pytest.mark.parametrize(
    ("model", "widths"),
    [
        (program(VOCAB, draft=SuffixDraft(tokens=2)), None),
        (program(VOCAB, outputs=("logits",)), None),
        (program(VOCAB), (2, 4)),
    ],
    ids=["a drafter", "no argmax", "no step of one token"],
)
def test_not_taken_where_the_program_does_more(model: Any, widths: Any, never_general: None):
    with pytest.raises(AssertionError, match="a general step"):
        generate(TableExecutable(whole(VOCAB), model, widths), torch.tensor([[1, 2]]))


def test_an_argmax_of_nothing_is_refused() -> None:
    class Broken(TableExecutable):
        def best(self, logits: torch.Tensor) -> torch.Tensor:
            return torch.full(logits.shape[:-1], -1)

    with pytest.raises(InputError, match="NaN"):
        generate(Broken(whole(VOCAB), program(VOCAB)), torch.tensor([[1, 2]]), max_new_tokens=3)


def test_seconds_add_up() -> None:
    executable = TableExecutable(whole(VOCAB), program(VOCAB))
    stats = generate(
        executable, torch.tensor([[1, 2]]), max_new_tokens=9, return_dict_in_generate=True
    ).stats
    assert stats.decode_seconds > stats.executable_seconds > 0 < stats.host_overhead
    assert (stats.steps, stats.new_tokens, stats.accepted_per_step) == (8, 9, 1.0)


@pytest.mark.parametrize("backend", mostly_long(("onnxruntime", "torch"), ["onnxruntime"]))
def test_what_is_done_once_counts_apart(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a call's time are disjoint, whatever is compiled within it."""
    executable = compile(cached_llama(Shape()), Target(backend, "cpu", threads=1))
    inner = executable._compile

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return inner(*args)

    monkeypatch.setattr(executable, "_compile", slow)
    made = []
    for _ in range(2):
        start, before = time.perf_counter(), executable.preparing
        ids = torch.tensor([[1, 2]])
        asked = {"max_new_tokens": 4, "return_dict_in_generate": True, "eos_token_id": []}
        stats = generate(executable, ids, **asked).stats
        wall = time.perf_counter() - start
        assert stats.preparing_seconds == pytest.approx(executable.preparing - before)
        assert stats.preparing_seconds + stats.prefill_seconds + stats.decode_seconds <= wall
        assert stats.decode_seconds >= stats.executable_seconds > 0 < stats.prefill_seconds
        made.append(stats.preparing_seconds)
    assert made[0] >= 0.3 and made[1] == 0
