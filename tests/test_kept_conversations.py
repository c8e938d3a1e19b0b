"""What the caches hold of earlier calls: prompts that go on from it give a fresh program's texts.

Random sequences of calls are compared with programs that were just compiled, tokens and accepted
drafts alike: rows that are wrong change the target's text, and rows of a draft's cache the drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_recipe import program_of
from selection import mostly_long, one_in, rarely
from test_runtime_cached import padded, with_itself
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import Program
from graftwork.ir.plan import FixedLength
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.caching.share_prefix import SharePrefix
from graftwork.passes.depth.skip_layers import SkipLayers
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.falcon.graph import DraftFalcon
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.nested.graph import CutDraft
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.cache.conversations import Conversations
from graftwork.runtime.memo import LEARNT

CONTEXT = 192
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "pad_token_id": 0}


def drafting(*passes: Pass, levels: int = 3, **shape: int) -> Program:
    tail = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), AddTopTokens())
    start = with_itself(context=CONTEXT, **shape)
    every = (*passes, *tail, named("tree_chain", depth=levels))
    return run_passes(start, [Step(p) for p in every])[0]


def plain() -> Program:
    tail = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), AddTopTokens())
    return run_passes(tiny_llama(context=CONTEXT), [Step(p) for p in tail])[0]


def skipping() -> Program:
    """Prompts run through more layers than what is generated, whose rows are then others."""
    tail = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax())
    every = (SkipLayers(layers=(1,), prefill="full"), *tail)
    return run_passes(tiny_llama(3, context=CONTEXT), [Step(p) for p in every])[0]


def losing(method: str, **options: Any) -> Program:
    """Rows are dropped; where a text was is not all there any more."""
    program = EvictCache(method=method, budget=32, block=8, **options).run(plain()).program
    return with_plan(program, draft=SuffixDraft(tokens=4))


MODELS: dict[str, Callable[[], Program]] = {
    "plain": plain,
    "skipping": skipping,
    "window": lambda: losing("window", positions="cache"),
    "snapkv": lambda: losing("snapkv", recent=8),
    "h2o": lambda: losing("h2o"),
    "pyramid": lambda: losing("snapkv", recent=8, layers="pyramid"),
    "suffix": lambda: with_plan(plain(), draft=SuffixDraft(tokens=5)),
    "recycling": lambda: with_plan(plain(), draft=RecyclingDraft(nodes=7)),
    "sharing": lambda: with_plan(SharePrefix().run(plain()).program, draft=SuffixDraft(tokens=5)),
    "eagle": lambda: drafting(DraftEagle()),
    "eagle chain": lambda: drafting(DraftEagle(), UnrollDraft(), FuseDraft()),
    "falcon": lambda: drafting(DraftFalcon()),
    "model": lambda: drafting(DraftModel(model="same")),
    "model, snapkv": lambda: (
        EvictCache(method="snapkv", budget=32, block=8, recent=8)
        .run(drafting(DraftModel(model="same")))
        .program
    ),
    "nested": lambda: (
        CutDraft(exits=(1,), threshold=0.1).run(drafting(DraftModel(model="same"))).program
    ),
    "staged": lambda: drafting(DraftModel(model="same", drafter="suffix(tokens=4)")),
}


class Failing:
    """A streamer that has enough after some tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self) -> None: ...


class Calls:
    """A user who makes calls of all kinds, and remembers the texts that came of them."""

    def __init__(self, program: Program, backend: str, seed: int) -> None:
        self.program, self.backend, self.random = program, backend, random.Random(seed)
        self.executable = compile(program, Target(backend, threads=1))
        self.texts: list[list[int]] = []
        self.reused = 0

    def prompt(self) -> list[int]:
        """A new text, or one that goes on from an earlier one, whole or from the middle of it."""
        draw = self.random
        new = [draw.randrange(1, 12) for _ in range(draw.choice([1, 2, 7, 25]))]
        if not self.texts or draw.random() < 0.25:
            return [draw.randrange(1, 12) for _ in range(draw.choice([3, 20, 40]))] + new
        text = draw.choice(self.texts[-6:])
        kept = len(text) if draw.random() < 0.6 else draw.randrange(1, len(text) + 1)
        return text[: min(kept, CONTEXT - 80)] + new[: draw.choice([0, 25])]

    def options(self) -> dict[str, Any]:
        draw = self.random
        found: dict[str, Any] = {"max_new_tokens": draw.choice([1, 8, 30])}
        # An end token that some sequences of a batch come to before others.
        found["eos_token_id"] = draw.choice([[], [5, 9, 17]])
        # A table that has learned drafts otherwise, and so other draws decide.
        learns = isinstance(self.program.plan.draft, RecyclingDraft)
        if draw.random() < 0.2 and not learns:
            found |= {"do_sample": True, "seed": draw.randrange(9)}
        return found

    def call(self) -> None:
        prompts = [self.prompt() for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
        options = self.options()
        ids, mask = padded(prompts)
        if self.random.random() < 0.15:
            failing = Failing(self.random.randrange(4))
            try:
                generate(self.executable, ids[:1], attention_mask=mask[:1], streamer=failing)
            except KeyboardInterrupt:
                return
        found = generate(self.executable, ids, attention_mask=mask, **ASKED, **options)
        fresh = compile(self.program, Target(self.backend, threads=1))
        wanted = generate(fresh, ids, attention_mask=mask, **ASKED, **options)
        assert found.sequences.tolist() == wanted.sequences.tolist(), (prompts, options)
        if not isinstance(self.program.plan.draft, RecyclingDraft):  # whose table learns
            for name in ("steps", "draft_tokens", "accepted_tokens"):
                assert getattr(found.stats, name) == getattr(wanted.stats, name), (name, prompts)
        assert not wanted.stats.reused_tokens
        self.reused += found.stats.reused_tokens
        for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
            self.texts.append([t for t in row[ids.shape[1] - len(prompt) :] if t])


@pytest.mark.parametrize("name", rarely(MODELS, 3, keep=("suffix", "h2o")))
def test_random_calls_give_what_a_fresh_program_gives(name: str) -> None:
    calls = Calls(MODELS[name](), "eager", seed=len(name))
    Conversations.of(calls.executable).most = 60_000  # some have to go
    for _ in range(30):
        calls.call()
    assert calls.reused > 200


def rows_held(executable: Any) -> dict[str, torch.Tensor]:
    """Of the one text that lies in the buffers, the rows that a drafter takes for good."""
    conversation = Conversations.of(executable).lying[0]
    assert conversation is not None
    made = next((int(n) for name, n in conversation.memo.items() if n.dim() == 0), 0)
    rows = executable.read_rows(list(executable.program.states), 0, 0, conversation.rows)
    own = [name for name in rows if not name.startswith("kv.")]
    assert 20 < made <= conversation.rows and own
    return {name: t[:, :made] if name in own else t for name, t in rows.items()}


@pytest.mark.parametrize("name", one_in(2, ["eagle", "eagle chain", "staged", "model"]))
def test_rows_are_those_of_a_fresh_program(name: str) -> None:
    """Drafts that nobody accepts cannot be told by the text: here their rows are looked at."""
    program, target = MODELS[name](), Target("eager", threads=1)
    executable, draw = compile(program, target), random.Random(1)
    text, asked = [draw.randrange(1, 12) for _ in range(40)], {"max_new_tokens": 9} | ASKED
    for cut, more in ((0, 0), (0, 3), (0, 1), (5, 2), (12, 9), (0, 20)):
        text = text[: len(text) - cut] + [draw.randrange(1, 12) for _ in range(more)]
        fresh, ids = compile(program, target), torch.tensor([text])
        found, wanted = (generate(e, ids, eos_token_id=[], **asked) for e in (executable, fresh))
        assert found.sequences.tolist() == wanted.sequences.tolist()
        assert found.stats.reused_tokens > 0 or len(text) == 40
        # Rows of the last draft are made when the next one is asked for.
        for state, rows in rows_held(fresh).items():
            held = rows_held(executable)[state]
            assert held.shape == rows.shape and torch.allclose(held, rows, atol=1e-5), state
        text = found.sequences[0].tolist()


@pytest.mark.parametrize("name", mostly_long(("plain", "eagle chain"), keep=("plain",)))
def test_random_calls_on_onnxruntime(name: str) -> None:
    calls = Calls(MODELS[name](), "onnxruntime", seed=3)
    for _ in range(8):
        calls.call()
    assert calls.reused > 50


@pytest.mark.parametrize("name", mostly_long(["recycling", "swift", "free"], ["recycling", "free"]))
def test_what_is_forgotten_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Neither rows nor what texts have taught, unless that is to be kept: the same call costs what
    it cost a fresh program."""
    program = program_of(name, tmp_path)
    plan = replace(program.plan, length=FixedLength())  # others look at the clock
    if name == "free":
        plan = replace(plan, depth=replace(plan.depth, threshold=0.05, posterior=0.4))  # type: ignore[call-arg]
    model = Model(program.replace(plan=plan), Target("eager", "cpu"), {"name": name})
    ids = torch.arange(1, 20)[None]

    def costs() -> tuple[float, ...]:
        stats = model.generate(ids, max_new_tokens=60, eos_token_id=[], **ASKED).stats
        assert any(model.executable.scratch(LEARNT, shared=True).values())
        counted = (stats.steps, stats.draft_tokens, stats.accepted_tokens, stats.skipped_layers)
        return (*counted, stats.reused_tokens)

    fresh = costs()
    model.forget()
    assert not model.executable.scratch(LEARNT, shared=True) and costs() == fresh
    model.forget(learnt=False)
    assert model.executable.scratch(LEARNT, shared=True)
    warm = costs()
    assert warm != fresh or name != "recycling"
    model.forget()
    assert costs() == fresh
