"""Caches of heads that hold as many rows as those look back: MoA's spans."""

from __future__ import annotations

import itertools

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from test_eviction import BLOCK, BUDGET, LAYERS, TEXT, Reference, asked, base, executable_of
from test_head_budgets import budgets_of

from graftwork.ir import PassError, Program, Weight, verify
from graftwork.ir.plan import DraftRecord, Evict, NoDraft
from graftwork.passes.caching.budgets.spans import _costs, beyond, cheapest
from graftwork.passes.caching.cached_rows import Read
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.split_heads import SplitHeads
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.runtime import generate

OPTIONS = {"method": "window", "layers": "spans", "budget": 48, "block": BLOCK, "sinks": 4}


def lopsided() -> Program:
    """A model in which the values of the second head of a layer's caches hardly count."""
    program = base()
    names = [name for name in program.weights if name.endswith("attention.q_k_v.weight")]
    made = []
    for name in names:
        whole = program.weights[name].load().clone()
        whole[112:128] *= 0.01
        made.append(Weight.of(name, whole))
    return program.replace(weights=program.weights.replacing(*made))


def spanned(draft: DraftRecord | None = None, **more: object) -> Program:
    program = with_plan(lopsided(), draft=draft or NoDraft())
    options = {**OPTIONS, "windows": 2, "length": 96, **more}
    steps = [Step(SplitHeads()), Step(EvictCache.model_validate(options))]
    made = run_passes(program, steps, evidence=evidence_for(program, 4096))[0]
    verify(made)
    return made


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_lies_beyond_a_span_is_counted_as_by_hand(softcap) -> None:
    random, length, sinks = torch.Generator().manual_seed(2), 12, 2
    q = torch.randn(1, 4, 14, 6, generator=random)
    k, v = (torch.randn(1, 2, 14, wide, generator=random) for wide in (6, 5))
    options = {"scale": 0.4} | ({} if softcap is None else {"softcap": softcap})
    got = beyond(Read(q, k, v, options), length, sinks, 14)
    for span in range(15):
        total = 0.0
        for head, place in itertools.product(range(4), range(9, length)):
            scores = k[0, head // 2, : place + 1] @ q[0, head, place] * 0.4
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            weights = torch.softmax(scores, 0)
            for row in range(sinks, place + 1):
                if place - row >= span:
                    total += float(weights[row] * v[0, head // 2, row].norm())
        assert float(got[span]) == pytest.approx(total, rel=1e-4, abs=1e-5)


@settings(max_examples=20)
@given(st.integers(0, 999), st.integers(0, 9))
def test_choices_are_the_cheapest_there_are(seed, most) -> None:
    costs = torch.rand(3, 5, generator=torch.Generator().manual_seed(seed))
    every = itertools.product(range(5), repeat=3)
    sums = {
        some: sum(float(costs[n, c]) for n, c in enumerate(some))
        for some in every
        if sum(some) <= most
    }
    picked = tuple(cheapest(costs, most))
    assert sums[picked] == pytest.approx(min(sums.values()))


def test_a_span_may_grow_with_the_text() -> None:
    """A span of 40 in texts of 80 is 5 and 10 at 10 and 20 tokens if all of it grows, and 40 if
    nothing does."""
    lost = torch.tensor([[9.0] * 5 + [0.0] * 16, [9.0] * 10 + [0.0] * 11])
    assert _costs(lost, torch.tensor([40, 0]), (10, 20), 80).tolist() == [0.0, 18.0]
    lost = torch.arange(21, 0, -1.0).expand(2, 21)
    # No part grows with the text: all of the 10 and of the 20 tokens.
    assert _costs(lost, torch.tensor([40]), (10, 20), 80).tolist() == [11.0 + 1.0]


def test_heads_that_lose_more_keep_more() -> None:
    rows = budgets_of(spanned())
    assert all(first > second == BLOCK for first, second in rows)
    assert sum(map(sum, rows)) <= 2 * LAYERS * 48


class SpanReference(Reference):
    """The first rows and the latest, so many as each head's budget is."""

    def __init__(self, budgets: list[list[int]]) -> None:
        super().__init__("window", start=lopsided())
        self.budgets = budgets


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
def test_heads_keep_the_first_rows_and_their_latest(backend: str) -> None:
    program, prompt = spanned(), TEXT[0].tolist()
    wanted = SpanReference(budgets_of(program)).decode(prompt, 65)
    found = generate(executable_of(program, backend), TEXT, **asked(65))
    assert found[0, len(prompt) :].tolist() == wanted


def test_of_one_head_of_keys_layers_have_spans_of_their_own() -> None:
    """As `moa` has it then, beside a window: its layer keeps what the window reaches."""
    shape = Shape(layers=4, groups=1, context=256, window=21, whole=(1, 2, 3))
    program = cached_llama(shape)
    less = []
    for name in (f"layers.{n}.attention.q_k_v.weight" for n in (2, 3)):
        whole = program.weights[name].load().clone()
        whole[-16:] *= 0.01  # values of two layers hardly count
        less.append(Weight.of(name, whole))
    program = program.replace(weights=program.weights.replacing(*less))
    options = {**OPTIONS, "windows": 2, "length": 96}
    steps = [Step(SplitHeads(), optional=True), Step(EvictCache.model_validate(options))]
    made = run_passes(program, steps, evidence=evidence_for(program, 4096))[0]
    plan = made.plan.cache
    assert isinstance(plan, Evict)
    rows = {**dict(zip(plan.capacities, plan.budgets, strict=True)), "C": plan.budget}
    near, *far = (rows[made.states[f"kv.{n}.key"].capacity or ""] for n in range(4))
    assert near == 24 and far[0] > sum(far[1:]) and sum(far) <= 3 * 48
    found = [generate(executable_of(made, b), TEXT, **asked(60)) for b in ("eager", "onnxruntime")]
    assert torch.equal(*found)


def test_drafts_change_nothing() -> None:
    plain, fast = (
        generate(executable_of(spanned(draft)), TEXT, **asked(60))
        for draft in (None, SuffixDraft(tokens=5))
    )
    assert torch.equal(plain, fast)


def test_what_would_go_wrong_is_refused() -> None:
    with pytest.raises(PassError, match="as method='window' does, got 'snapkv'"):
        spanned(method="snapkv", recent=4)
    with pytest.raises(PassError, match="run split_heads before"):
        options = {**OPTIONS, "budget": BUDGET, "windows": 2, "length": 96}
        EvictCache.model_validate(options).apply(base(), evidence_for(base(), 4096))
