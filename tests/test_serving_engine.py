"""The engine: requests that come and go get the tokens that they get alone."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from archs import build
from recurrent_archs import RECURRENT

import graftwork as gw
from graftwork.ir import InputError, UnsupportedError
from graftwork.runtime.feeding.draft import Draft, VerifiedStep
from graftwork.runtime.serving import engine as engines
from graftwork.runtime.serving.engine import Engine
from graftwork.runtime.serving.joined import JoinedDrafts
from graftwork.runtime.serving.lengths import SharedLengths
from graftwork.runtime.serving.slot import Slot
from graftwork.runtime.serving.ticket import End, QueueFull, Reason, Ticket
from graftwork.runtime.speculate.draft_cache import DraftCall
from graftwork.runtime.speculate.lengths import LENGTHS

DEMO = "graftwork/demo_model"
LONG = {"max_new_tokens": 900, "do_sample": False, "eos_token_id": None}
Asked = tuple[list[int], dict[str, Any]]


@dataclass
class Client:
    """Waits for a request. held: while it is set, the engine's thread waits after the first token:
    nothing happens behind the test's back."""

    held: bool = False
    tokens: list[int] = field(default_factory=list)
    end: End | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    ticket: Ticket | None = None

    def __call__(self, new: list[int], end: End | None) -> None:
        self.tokens += new
        self.begun.set()
        if self.held:
            assert self.go.wait(60)
        if end is not None:
            self.end = end
            self.over.set()

    def ask(self, engine: Engine, asked: Asked, **more: Any) -> Client:
        self.ticket = engine.submit(engine.read(*asked), self, **more)
        return self

    def reason(self) -> Reason:
        assert self.over.wait(60)
        assert self.end is not None
        return self.end.reason


def some_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 2000, (count,), generator=generator).tolist()


def ragged() -> list[Asked]:
    """Greedy and sampled requests of all lengths; some begin alike."""
    alike = some_ids(70, 99)
    asked: list[Asked] = []
    for seed, (length, new) in enumerate([(1, 9), (40, 3), (7, 30), (90, 12), (3, 1), (150, 8)]):
        prompt = some_ids(length, seed)
        sampled = {"do_sample": True, "seed": seed, "top_p": 0.9, "max_new_tokens": new}
        asked.append((prompt, {"do_sample": False, "max_new_tokens": new}))
        asked.append(([*alike, *prompt[:5]], sampled if seed % 2 else {**asked[0][1]}))
    return asked


def alone(model: gw.Model, asked: Sequence[Asked]) -> list[list[int]]:
    found = []
    for ids, options in asked:
        model.forget()
        found.append(model.generate([ids], **options)[0, len(ids) :].tolist())
    model.forget()
    return found


@pytest.fixture(scope="module")
def model() -> gw.Model:
    return gw.optimize(DEMO, "int8", target="onnxruntime:cpu:float32")


@pytest.fixture
def engine(model: gw.Model) -> Iterator[Engine]:
    made = Engine(model.executable, slots=2, queue=2)
    yield made
    made.close()


def served(model: gw.Model, asked: Sequence[Asked], **settings: Any) -> tuple[list[Client], Engine]:
    engine = Engine(model.executable, **{"slots": 3, "chunk": 16, **settings})
    clients = [Client().ask(engine, one) for one in asked]
    for client in clients:
        assert client.reason() in (Reason.STOP, Reason.LENGTH), client.end
    engine.close()
    return clients, engine


def test_answers_are_those_of_requests_alone(model: gw.Model) -> None:
    asked = ragged()
    wanted = alone(model, asked)
    clients, engine = served(model, asked)
    assert [client.tokens for client in clients] == wanted
    figures = engine.figures
    assert figures.sequence_steps > 1.5 * figures.steps, "requests took their steps alone"
    assert figures.reused_tokens >= 70, "texts that begin alike were read anew each time"
    assert figures.new_tokens == sum(map(len, wanted))
    assert (figures.running, figures.waiting) == (0, 0)


def test_memory_is_given_back(model: gw.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every turn: it takes milliseconds."""
    given: list[float] = []
    engine = Engine(model.executable, slots=2)
    now = iter(range(0, 10**6, 4))
    engine.clock = lambda: next(now)
    monkeypatch.setattr(engines, "give_back", lambda: given.append(engine.figures.busy))
    client = Client().ask(engine, ([5, 6, 7], {"max_new_tokens": 9, "do_sample": False}))
    assert client.reason() is Reason.LENGTH
    engine.close()
    assert given and all(after - before >= 10 for before, after in itertools.pairwise(given))


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("copyspec", "onnxruntime"),
        ("streaming_llm", "onnxruntime"),
        ("draft_model", "onnxruntime"),
        ("eagle_chain", "onnxruntime"),
        ("layerskip", "onnxruntime"),
        pytest.param("recycling", "onnxruntime", marks=pytest.mark.long),
        pytest.param("medusa", "onnxruntime", marks=pytest.mark.long),
        pytest.param("eagle2", "onnxruntime", marks=pytest.mark.long),
        pytest.param("swift", "onnxruntime", marks=pytest.mark.long),
        pytest.param("draft_model", "torch", marks=pytest.mark.long),
        pytest.param("snapkv", "onnxruntime", marks=pytest.mark.long),
        pytest.param("int4", "torch", marks=pytest.mark.long),
    ],
)
def test_drafts_and_caches_work_as_alone(recipe: str, target: str) -> None:
    small = ["evict_cache.budget=64"]
    drops = small if recipe in ("streaming_llm", "snapkv") else []
    chosen = gw.Recipe.load(recipe).with_options(drops)
    other = DEMO if recipe == "draft_model" else None
    made = gw.optimize(DEMO, chosen, target=f"{target}:cpu:float32", draft=other)
    asked = [(ids * 2, options) for ids, options in ragged()[:8]]
    wanted = alone(made, asked)
    clients, engine = served(made, asked)
    assert [client.tokens for client in clients] == wanted
    if made.program.plan.speculates:
        assert engine.figures.draft_tokens > 0
        assert engine.figures.accepted_tokens > 0 or recipe in UNTAUGHT


UNTAUGHT = ("medusa", "eagle2", "eagle_chain", "s2d")
"""Recipes whose heads nobody has trained: what they draft is chance."""


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("draft_model", "onnxruntime"),
        ("eagle_chain", "onnxruntime"),
        ("s2d", "onnxruntime"),
        ("eagle2", "eager"),
        pytest.param("eagle2", "onnxruntime", marks=pytest.mark.long),
        pytest.param("draft_model", "torch", marks=pytest.mark.long),
    ],
)
def test_drafts_of_several_requests_are_made_together(
    recipe: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none takes the time in which others are made for its own."""
    make, walls, shares = JoinedDrafts.make, [], []

    def timed(drafts: JoinedDrafts, slots: Sequence[Slot], draft: Any) -> list[Draft]:
        begun = time.perf_counter()
        made = make(drafts, slots, draft)
        walls.append(time.perf_counter() - begun)
        shares.append(sum(slot.drafting for slot in slots if slot.decodes))
        return made

    monkeypatch.setattr(JoinedDrafts, "make", timed)
    other = DEMO if recipe == "draft_model" else None
    made = gw.optimize(DEMO, recipe, target=f"{target}:cpu:float32", draft=other)
    lengths = (5, 2, 9, 5, 40)  # the last one waits for a slot, and joins those that are left
    options = {"do_sample": False, "eos_token_id": None}
    asked = [
        (some_ids(length, seed), options | {"max_new_tokens": 30 + 9 * (seed % 3)})
        for seed, length in enumerate(lengths)
    ]
    asked[1][1].update(do_sample=True, seed=3)
    wanted = alone(made, asked)
    slots = 2 if target == "torch" else 4  # each number of texts is compiled
    clients, engine = served(made, asked, slots=slots, chunk=256)
    assert [client.tokens for client in clients] == wanted
    figures = engine.figures
    assert engine.drafts.calls > figures.steps / 3
    if recipe == "draft_model":  # the model itself: what it drafts for others is nothing of theirs
        assert figures.accepted_tokens > 0.9 * figures.draft_tokens
    assert all(share <= wall for share, wall in zip(shares, walls, strict=True))
    assert figures.accepted_tokens > 0 or recipe in UNTAUGHT


def test_calls_of_several_texts_are_one_with_zeros_behind_the_shorter() -> None:
    def call(count: int, past: int) -> DraftCall:
        tokens = np.arange(count, dtype=np.int64)[None] + 5
        tree = np.tri(count, dtype=np.bool_)[None]
        tree[0, -1, 1:-1] = False  # a sibling
        given = tokens, tokens + past, [past], np.array([[count - 1]])
        return DraftCall(*given, torch.full((1, count, 2), float(count)), tree)

    one = DraftCall.of([call(3, 4), call(1, 9)])
    assert one.tokens.tolist() == [[5, 6, 7], [5, 0, 0]]
    assert one.positions.tolist() == [[9, 10, 11], [14, 0, 0]]
    assert (one.past, one.select.tolist()) == ([4, 9], [[2], [0]])
    assert one.hidden is not None and one.hidden[..., 0].tolist() == [[3, 3, 3], [1, 0, 0]]
    assert one.ancestors is not None and one.ancestors.astype(int).tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]
    assert one.absent == ("seen", "before") and not one.silent


def test_a_call_for_several_drafts_that_fails_ends_their_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = gw.optimize(DEMO, "baseline", target="eager", draft=DEMO)
    asked = [(some_ids(9, seed), LONG | {"max_new_tokens": 40}) for seed in range(3)]
    wanted = alone(made, asked)

    made_ = JoinedDrafts._made
    failed: list[int] = []

    def fails_once(drafts: JoinedDrafts, first: int, calls: Sequence[Any]) -> Any:
        if not failed:
            failed.append(first)
            raise RuntimeError("no memory")
        return made_(drafts, first, calls)

    monkeypatch.setattr(JoinedDrafts, "_made", fails_once)
    engine = Engine(made.executable, slots=3, chunk=256)
    clients = [Client().ask(engine, one) for one in asked]
    ended = [client.reason() for client in clients]
    assert ended.count(Reason.ERROR) >= 2
    assert all(
        c.end is not None and "no memory" in str(c.end.error) for c in clients if c.end.error
    )
    again = Client().ask(engine, asked[0])
    assert again.reason() is Reason.LENGTH and again.tokens == wanted[0]
    engine.close()


@pytest.mark.parametrize("recipe", ["draft_model", "eagle2", "s2d"])
def test_drafts_go_on_from_kept_rows_up_to_the_end(recipe: str) -> None:
    """A turn of a conversation in a slot, whose draft's rows are there; drafts at the end of the
    context need no memory beyond what the slots began with."""
    other = DEMO if recipe == "draft_model" else None
    made = gw.optimize(DEMO, recipe, target="onnxruntime:cpu:float32", draft=other)
    first = (some_ids(40, 5), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None})
    plain = gw.optimize(DEMO, "baseline", target="onnxruntime:cpu:float32")
    text = plain.generate([first[0]], **first[1])[0].tolist()
    second = ([*text, 7, 8, 9], {**first[1], "max_new_tokens": 256 - len(text) - 3})
    engine = Engine(made.executable, slots=2, chunk=16, context=256)
    room = engine.executable.capacity
    clients = []
    for asked in (first, second):
        clients.append(Client().ask(engine, asked))
        assert clients[-1].reason() is Reason.LENGTH
    assert engine.figures.reused_tokens >= 70 and engine.executable.capacity == room
    engine.close()
    assert clients[0].tokens == text[40:]
    wanted = plain.generate([second[0]], **second[1])[0, len(second[0]) :].tolist()
    assert clients[1].tokens == wanted


@pytest.mark.measured
@pytest.mark.parametrize("count", [1, 4])
def test_drafts_are_decided_on_for_all(count: int) -> None:
    """Columns of four texts cost what they bring, those of one cost next to nothing: what a draft
    of its own would bring each of the four is not asked."""
    made = gw.optimize(DEMO, "baseline", target="eager", draft=DEMO)
    shared, length = SharedLengths(made.executable), made.program.plan.length
    own = LENGTHS.find(length)(length, made.executable, 1)
    bound = [shared.of(own) for _ in range(count)]
    sizes = []
    for step in range(400):
        shared.decide([(one, 50) for one in bound])
        size = bound[0].limits([50])[0]
        assert all(one.limits([50]) == [size] for one in bound)
        accepted = min(size, 2) if step % 2 else min(size, 1)
        draft = Draft([5] * size)
        taken = VerifiedStep([draft], [range(accepted)], [[5] * (accepted + 1)], [0], {})
        columns = count * (1 + size)
        took = 0.010 + (0.012 * max(columns - 8, 0))
        shared.observe([(one, taken) for one in bound], 0.001 * size * count, took)
        sizes.append(size)
    late = sizes[200:]
    assert sum(size > 0 for size in late) > 150 if count == 1 else sum(late) < 40


@pytest.mark.untrained
def test_untrained_heads_are_not_asked() -> None:
    made = gw.optimize(DEMO, "eagle_chain", target="onnxruntime:cpu:float32")
    plain = gw.optimize(DEMO, "baseline", target="onnxruntime:cpu:float32")
    asked = ragged()[:4]
    clients, engine = served(made, asked)
    assert [client.tokens for client in clients] == alone(plain, asked)
    assert engine.figures.draft_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_recurrences_are_those_of_requests_alone(family: str) -> None:
    made = gw.optimize(build(RECURRENT[family]), "copyspec", target="eager")
    most = min(made.program.info.context, 256)
    short = {"max_new_tokens": most // 4}
    asked = [([i % 120 + 3 for i in ids[: most // 2]], {**o, **short}) for ids, o in ragged()[::2]]
    wanted = alone(made, asked)
    clients, engine = served(made, asked, slots=2, context=most)
    assert [client.tokens for client in clients] == wanted
    assert engine.figures.sequence_steps > engine.figures.steps


def test_a_cancelled_request_frees_its_slot(engine: Engine) -> None:
    first, second = (Client().ask(engine, ([5, seed], LONG)) for seed in (6, 7))
    assert first.begun.wait(60) and second.begun.wait(60)
    third = Client().ask(engine, ([5, 8], {"max_new_tokens": 2, "do_sample": False}))
    assert not third.over.wait(0.05)
    first.ticket.cancel()
    assert first.reason() is Reason.CANCELLED
    assert third.reason() is Reason.LENGTH and len(third.tokens) == 2
    assert len(first.tokens) < LONG["max_new_tokens"]
    assert not second.over.is_set()
    second.ticket.cancel()
    assert second.reason() is Reason.CANCELLED


def test_a_full_queue_turns_requests_away(engine: Engine) -> None:
    holding = Client(held=True).ask(engine, ([5, 6], LONG))
    assert holding.begun.wait(60)
    waiting = [Client().ask(engine, ([5, n], LONG)) for n in range(3)]  # a slot and the queue
    with pytest.raises(QueueFull, match="wait already"):
        Client().ask(engine, ([5, 9], LONG))
    assert engine.figures.rejected == 1
    for client in [holding, *waiting]:
        client.ticket.cancel()
    holding.go.set()
    assert {client.reason() for client in [holding, *waiting]} == {Reason.CANCELLED}


def test_late_requests_end_and_clients_take_turns(model: gw.Model) -> None:
    engine = Engine(model.executable, slots=2, queue=8)
    holding = [Client(held=True).ask(engine, ([5, n], LONG), client="a") for n in (6, 7)]
    assert holding[0].begun.wait(60)
    order: list[str] = []

    class Noting(Client):
        def __call__(self, new: list[int], end: End | None) -> None:
            order.append(self.ticket.client)
            super().__call__(new, end)

    late = Client().ask(engine, ([5, 8], LONG), client="b", seconds=0.0)
    short = ([5, 8], {"max_new_tokens": 1, "do_sample": False})
    waiting = [Noting().ask(engine, short, client=client) for client in "ab"]
    holding[0].ticket.cancel()
    for client in holding:
        client.go.set()
    assert late.reason() is Reason.TIMEOUT and not late.tokens
    assert [client.reason() for client in waiting] == [Reason.LENGTH] * 2
    assert order == ["b", "a"], "the client without a running request comes first"
    engine.close()


def test_bad_requests_are_refused_at_once(engine: Engine) -> None:
    context = engine.context
    for ids, options, message in (
        ([], {}, "input_ids"),
        ([10**6], {}, "token id"),
        ([1] * (context + 1), {}, f"{context + 1} tokens.*{context}"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"num_beams": 2}, "num_beams"),
    ):
        with pytest.raises(InputError, match=message):
            engine.read(ids, options)


def test_the_executable_is_free_once_the_engine_is_closed(model: gw.Model) -> None:
    engine = Engine(model.executable, slots=2)
    running = Client().ask(engine, ([5, 6], LONG))
    assert running.begun.wait(60)
    engine.close()
    assert running.reason() is Reason.CLOSED
    with pytest.raises(InputError, match="closed"):
        Client().ask(engine, ([5, 6], LONG))
    assert model.generate([[5, 6]], max_new_tokens=2).shape == (1, 4)


@pytest.mark.parametrize("recipe", ["calm", "hydragen"])
def test_recipes_whose_steps_cannot_be_shared_are_refused(recipe: str) -> None:
    settings = {"calm": ["depth_confident.threshold=0.9"]}.get(recipe, [])
    made = gw.optimize(DEMO, gw.Recipe.load(recipe).with_options(settings), target="eager")
    with pytest.raises(UnsupportedError, match=r"cannot be served.*take another recipe"):
        Engine(made.executable)


def test_parts_of_the_sequences_share_their_buffers(model: gw.Model) -> None:
    for target in ("eager", "onnxruntime"):
        executable = gw.optimize(DEMO, "baseline", target=f"{target}:cpu:float32").executable
        executable.begin(4, 32)
        part, states = executable.sequences(1, 2), [*executable.program.states]
        rows = part.read_rows(states, 1, 0, 3)
        for value in rows.values():
            value.fill_(7.0)
        part.write_rows(1, 0, rows)
        executable.reserve(2 * executable.capacity)  # new memory
        part.begin(2, 8)  # and the others keep what they have
        for value in executable.read_rows(states, 2, 0, 3).values():
            assert bool((value == 7.0).all())
        for value in executable.read_rows(states, 1, 0, 3).values():
            assert not bool((value == 7.0).any())
        with pytest.raises(InputError, match="there are 4 sequences"):
            executable.sequences(3, 2)
