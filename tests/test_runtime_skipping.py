"""The target without some of its segments drafts: the same text, and the right ones left out."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from selection import on_backends
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight, WeightStore
from graftwork.ir.execution.executable import Executable
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.clasp import nearest
from graftwork.passes.drafting.swift import Search, SearchedSkippingDraft, promise
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.runtime.memo import learnt

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
EACH, HALVES = CutDepth(every=1), CutDepth(every=1, sublayers=True)
LIKEST = (AcceptTrees(), EACH, named("draft_likest_skipping", share=0.5, period=2))
SEARCHED = (HALVES, named("draft_searched_skipping", share=0.5, window=8))
COPIES = named("draft_suffix", shortest=1)
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "likest": LIKEST,
    "searched": SEARCHED,
    "likest sublayers": (AcceptTrees(), HALVES, named("draft_likest_skipping", share=0.7)),
    "likest after copies": (COPIES, *LIKEST),
    "searched after copies": (COPIES, *SEARCHED),
    "searched, goodput": (*SEARCHED, named("length_goodput")),
    "likest in int8": (*LIKEST, in_int8()),
    "searched in int8": (*SEARCHED, in_int8()),
    "likest, cache in int8": (*LIKEST, named("quantize_cache", bits=8)),
    "searched, cache in int8": (*SEARCHED, named("quantize_cache", bits=8)),
}


def made(*passes: Pass, start: Program | None = None) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(start or tiny_llama(4), [Step(p) for p in every])[0]


def plainly(which: str) -> tuple[Pass, ...]:
    """What of a drafting recipe is no draft."""
    return tuple(p for p in DRAFTS[which] if p.name.startswith("quantize"))


@cache
def compiled(backend: str, which: str, drafts: bool) -> Executable:
    passes = DRAFTS[which] if drafts else plainly(which)
    return compile(made(*passes), Target(backend, "cpu", threads=1))


def same_texts(plain: Executable, fast: Executable) -> bool:
    """That drafts change no text, of a ragged batch and of a prompt alone; whether both drafted."""
    drafted = []
    for rows in (slice(0, 4), slice(2, 3)):
        ids, mask = PROMPTS[rows], MASK[rows]
        expected = generate(plain, ids, attention_mask=mask, **ASKED)
        found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **ASKED)
        assert torch.equal(found.sequences, expected)
        drafted.append(found.stats.draft_tokens > 0)
    return all(drafted)


RARE = [which for which in DRAFTS if which.startswith("searched") and which.endswith("int8")]
RARE += ["likest, cache in int8", "likest after copies", "likest in int8"]


@pytest.mark.parametrize(("which", "backend"), on_backends(DRAFTS, {"searched"}, rare=RARE))
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    drafted = same_texts(compiled(backend, which, False), compiled(backend, which, True))
    # Goodput may hold, of so short a text, that no draft pays.
    assert drafted or "goodput" in which


def test_prompts_run_the_step_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, called = compile(made(*LIKEST), Target("eager", "cpu")), list[str]()
    inner = fast.run

    def spy(function: str, *given: Any, **more: Any) -> Any:
        called.append(function)
        return inner(function, *given, **more)

    monkeypatch.setattr(fast, "run", spy)
    generate(fast, PROMPTS, attention_mask=MASK, max_new_tokens=1)
    assert called and set(called) == {"step"}
    again = generate(fast, PROMPTS[2:3], return_dict_in_generate=True, **ASKED)
    assert again.stats.draft_tokens  # whose steps are cut, and what they wrote can be gone on from
    longer = torch.cat([again.sequences, torch.tensor([[3]])], 1)
    more = generate(fast, longer, return_dict_in_generate=True, **ASKED)
    assert more.stats.reused_tokens >= longer.shape[1] - 3


def idle(*names: str) -> Program:
    """A model of six layers, some parts of which add nothing."""
    program = tiny_llama(6)
    gone = {f"layers.{name}" for name in names}
    weights = {
        name: Weight.of(name, torch.zeros_like(old.load())) if name in gone else old
        for name, old in program.weights.items()
    }
    assert gone <= set(weights)
    return program.replace(weights=WeightStore(weights))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("layers", [(1, 3), (2, 4)])
def test_layers_that_do_nothing_are_found_at_once(layers: tuple[int, int], backend: str) -> None:
    start = idle(*(f"{layer}.{part}" for layer in layers for part in ("o", "down")))
    passes = (AcceptTrees(), EACH, named("draft_likest_skipping", share=0.5))
    fast = compile(made(*passes, start=start), Target(backend, "cpu", threads=1))
    plain = compile(made(start=start), Target(backend, "cpu", threads=1))
    asked = {**ASKED, "max_new_tokens": 26}  # the prompts' own, and five steps of five
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, generate(plain, PROMPTS, attention_mask=MASK, **asked))
    assert found.stats.accepted_per_step == 5.0


def test_sublayers_that_do_nothing_are_searched_for() -> None:
    """And what was found serves the next text from its first step on."""
    start = idle("1.o", "3.down")
    passes = (HALVES, named("draft_searched_skipping", share=0.25, window=12, enough=1.0))
    fast = compile(made(*passes, start=start), Target("eager", "cpu"))
    texts = torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    generate(fast, texts, **{**ASKED, "max_new_tokens": 100})
    (search,) = learnt(fast, Search).values()
    assert search.best == ((2, 7), 1.0) and 1 < len(search.tried) <= 28
    asked = {**ASKED, "max_new_tokens": 26, "return_dict_in_generate": True}
    assert generate(fast, PROMPTS[2:3], **asked).stats.accepted_per_step == 5.0


def test_the_dynamic_program_by_hand() -> None:
    """Segment 2, which may be left out, turns the state that skipped segment 1 towards the whole
    text's, and the whole one's away from it."""
    whole, turned = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    best = [(whole, (0, 1)), (turned, (0,))]
    nearer, away = torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 1.0]])
    found = nearest(best, [whole, nearer], 2, skips=True)
    assert [kept for _, kept in found] == [(0, 1, 2), (0, 1), (0,)]
    found = nearest(best, [turned, away], 2, skips=True)
    assert [kept for _, kept in found] == [(0, 1, 2), (0, 1), (0,)]
    found = nearest([(turned, (0, 1)), (whole, (0,))], [whole, nearer], 2, skips=True)
    assert [kept for _, kept in found] == [(0, 1, 2), (0, 2), (0,)]
    found = nearest(best, [whole, nearer], 2, skips=False)
    assert [kept for _, kept in found] == [(0, 1, 2), (0, 2)]


def test_a_suggestion_is_near_what_scored_well() -> None:
    known = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 0, 0]]).double()
    new = torch.tensor([[0, 0, 0, 1, 0, 1], [1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1]]).double()
    assert promise(known, torch.tensor([0.1, 0.2, 0.9]).double(), new) in (0, 1)
    assert promise(known[:2], torch.tensor([0.9, 0.1]).double(), new[1:]) == 0


def test_a_search_finds_what_is_best_and_ends() -> None:
    record = SearchedSkippingDraft(tries=60, guided=2, enough=1.0)
    search, steps = Search(record, range(2, 10), 3), 0
    while not search.over and steps < 1000:
        choice, steps = search.next(), steps + 1
        assert (
            choice is not None
            and choice not in search.tried
            and len(choice) == 3
            and set(choice) <= set(range(2, 10))
        )
        search.learn(choice, len({3, 5, 8} & set(choice)) / 3)
    assert search.best == ((3, 5, 8), 1.0) and len(search.tried) < 56
    assert Search(SearchedSkippingDraft(tries=1), range(9), 3).over is False


@pytest.mark.parametrize("which", ["likest", "searched"])
def test_sampled_texts_keep_their_distribution(which: str) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "eos_token_id": []}
    ids = PROMPTS[2:3].expand(400, -1)
    counts = []
    for drafts in (False, True):
        fast = compiled("eager", which, drafts)
        texts = generate(fast, ids, seed=11, temperature=0.7, **asked)
        counts.append(torch.bincount(texts[:, -1], minlength=32).double())
    plain, fast_counts = counts
    often = (plain + fast_counts) >= 10
    chi = ((plain - fast_counts) ** 2 / (plain + fast_counts).clamp(min=1))[often].sum()
    free = int(often.sum()) - 1
    assert free >= 5 and chi < free + 4 * (2 * free) ** 0.5


def test_what_cannot_be_is_refused_by_name() -> None:
    draft = named("draft_searched_skipping")
    with pytest.raises(PassError, match="segments"):
        made(draft)
    with pytest.raises(PassError, match=r"has none: set cut_depth.every=1"):
        made(draft, CutDepth(exits=(2,)))
    with pytest.raises(PassError, match=r"cut inside some: leave cut_depth.sublayers out"):
        made(HALVES, named("depth_linear"))
    with pytest.raises(PassError, match=r"cut inside some: leave cut_depth.sublayers out"):
        made(HALVES, named("depth_confident"))
    with pytest.raises(PassError, match=r"verifies by all layers, and depth="):
        made(draft, EACH, named("depth_linear"))
    with pytest.raises(PassError, match="one node a level"):
        made(draft, EACH, AcceptTrees(), named("tree_best_first"))
