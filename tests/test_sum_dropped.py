"""What dropped rows add up to (LESS): the state against loops by hand, and texts with drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama
from hypothesis import given
from hypothesis import strategies as st
from selection import on_backends
from test_kept_conversations import drafting
from test_runtime_cached import padded
from tiny import tiny_llama

from graftwork.backends import Target, compile
from graftwork.ir import Program, run
from graftwork.ir.ops.dropped import add_dropped, other_rows, positive_features, read_dropped
from graftwork.ir.ops.eviction import take_rows
from graftwork.ir.plan import NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.caching.sum_dropped import SumDropped
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.fuse_draft import FuseDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.feed import empty_inputs
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

SUM = SumDropped(rank=4, inner=8, steps=20, windows=2, length=96)
BUDGET, BLOCK, SINKS = 16, 8, 2
GREEDY: dict[str, Any] = {
    "max_new_tokens": 24,
    "do_sample": False,
    "eos_token_id": [],
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(1, 12, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def remembering(program: Program, method: str = "window", budget: int = BUDGET) -> Program:
    evict = EvictCache(method=method, budget=budget, block=BLOCK, sinks=SINKS)
    dropping = evict.run(program).program
    return SUM.apply(dropping, evidence_for(dropping)).program


@lru_cache
def one_layer() -> Program:
    tail = (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(1, context=192), [Step(p) for p in tail])[0]


@lru_cache
def model(name: str) -> Program:
    if name == "chain":
        return remembering(drafting(DraftEagle(), UnrollDraft(), FuseDraft()))
    return remembering(with_plan(drafting(DraftEagle()), draft=NoDraft()), "h2o")


@given(st.integers(0, 99), st.sampled_from((8, 4, 0)))
def test_sums_are_those_of_loops(seed, past):
    made = torch.Generator().manual_seed(seed)
    state = torch.rand(2, 1, 5, 4, generator=made)
    features = torch.rand(2, 1, 9, 2, generator=made)
    values = torch.randn(2, 1, 9, 3, generator=made)
    rows = torch.stack([torch.randperm(8, generator=made)[:4].sort().values for _ in range(2)])
    held = torch.tensor([8, past])
    others = other_rows(rows[:, None], full=8)
    gone = take_rows(features, others), take_rows(values, others)
    got = add_dropped(state, *gone, held, full=8, block=4)
    for b, count in enumerate(held.tolist()):
        want = state[b, 0, :2] * float(count != 4)
        for row in range(count if count == 8 else 0):
            if row not in rows[b].tolist():
                one = torch.cat([values[b, 0, row], torch.ones(1)])
                want = want + features[b, 0, row][:, None] * one
        torch.testing.assert_close(got[b, 0], want)
    asked = torch.rand(2, 2, 3, 2, generator=made)
    positions = torch.tensor([[9, 10, 11], [4, 5, 6]])
    out, weight = read_dropped(asked, got, positions, torch.tensor([5, 4]))
    sums = asked[0] @ got[0]
    torch.testing.assert_close(out[0], sums[..., :3] / sums[..., 3:])
    torch.testing.assert_close(weight[0], sums[..., 3].log())
    assert not out[1].any() and bool((weight[1] == float("-inf")).all())


@lru_cache
def windowed() -> Program:
    """A layer that looks back over a window, and one that sees all."""
    shape = Shape(layers=2, context=192, window=21, whole=(1,))
    return with_plan(cached_llama(shape), draft=NoDraft())


@pytest.mark.parametrize(
    ("plain", "layer", "budget", "backend"),
    [
        *((one_layer, "kv.0", BUDGET, backend) for backend in ("eager", "onnxruntime")),
        (windowed, "kv.1", 2 * BUDGET, "eager"),
        pytest.param(windowed, "kv.1", 2 * BUDGET, "onnxruntime", marks=pytest.mark.long),
    ],
)
def test_the_state_holds_what_was_dropped_of_each_text(
    plain: Callable[[], Program], layer: str, budget: int, backend: str
) -> None:
    """Of a layer behind nothing that loses rows, so that its keys and values are the plain
    program's; twice, so that a text begins where another one was."""
    program = remembering(plain(), budget=budget)
    assert [name for name in program.states if name.endswith("dropped")] == [f"{layer}.dropped"]
    fast = compile(program, Target(backend, threads=1))
    weights = {n: w.load() for n, w in program.weights.items() if n.startswith(f"{layer}.key_")}
    layers = [weights[f"{layer}.key_{n}"] for n in ("inner", "outer", "last")]
    for seed in (1, 2):
        prompts = [prompt(50, seed), prompt(37, seed + 5), prompt(9, seed + 9)]
        ids, mask = padded(prompts)
        generated = generate(fast, ids, attention_mask=mask, **GREEDY).sequences
        for b, (row, asked) in enumerate(zip(generated.tolist(), prompts, strict=True)):
            text = torch.tensor([row[len(row) - len(asked) - 24 : -1]])
            caches = run(plain(), "step", empty_inputs(plain(), "step", text))
            keys, values = caches[f"{layer}.key"], caches[f"{layer}.value"]
            features, want = positive_features(keys, *layers)[0], 0.0
            last = (text.shape[1] - 1) // BLOCK * BLOCK  # rows go before the next token comes
            gone = range(SINKS, last - budget + SINKS) if last >= budget + BLOCK else range(0)
            for place in gone:
                one = torch.cat([values[0, :, place], torch.ones(len(features), 1)], -1)
                want = want + features[:, place, :, None] * one[:, None]
            if gone:
                held = fast.read_rows([f"{layer}.dropped"], b, 0, 4)[f"{layer}.dropped"]
                torch.testing.assert_close(held, want, rtol=1e-4, atol=1e-5)


def test_learning_leaves_less_of_the_error_and_says_how_much() -> None:
    dropping = EvictCache(method="window", budget=BUDGET, block=BLOCK).run(one_layer()).program
    outcome = SUM.apply(dropping, evidence_for(dropping))
    (remark,) = outcome.remarks
    assert "of the squared error that dropping rows makes" in remark
    assert float(remark.rpartition(" ")[2]) < 0.95
    again = SUM.apply(dropping, evidence_for(dropping)).program
    for name, weight in outcome.program.weights.items():
        assert torch.equal(weight.load(), again.weights[name].load()), name


@pytest.mark.parametrize(("name", "backend"), on_backends(["suffix", "chain"], ["chain"]))
def test_drafts_say_what_the_target_says_alone(name: str, backend: str) -> None:
    program = model(name)
    if name == "suffix":
        program = with_plan(program, draft=SuffixDraft(tokens=4))
    fast = compile(program, Target(backend, threads=1))
    prompts = [prompt(60, 1) + prompt(60, 1)[:9], prompt(33, 2), prompt(8, 3)]
    ids, mask = padded(prompts)
    found = generate(fast, ids, attention_mask=mask, **GREEDY)
    for row, asked in zip(found.sequences.tolist(), prompts, strict=True):
        plain = compile(with_plan(model("suffix"), draft=NoDraft()), Target(backend, threads=1))
        if name == "chain":
            plain = compile(program, Target(backend, threads=1))
        wanted = generate(plain, torch.tensor([asked]), **GREEDY).sequences[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted
    assert name == "chain" or found.stats.accepted_tokens > 0


def test_while_nothing_is_dropped_nothing_changes() -> None:
    plain = with_plan(drafting(DraftEagle()), draft=NoDraft())
    whole = EvictCache(method="h2o", budget=128, block=BLOCK).run(plain).program
    longer = SumDropped(rank=4, inner=8, steps=0, windows=1, length=160)
    fast = compile(longer.apply(whole, evidence_for(whole)).program, Target("eager"))
    ids = torch.tensor([prompt(70, 4)])
    wanted = generate(compile(plain, Target("eager")), ids, **GREEDY).sequences
    assert torch.equal(generate(fast, ids, **GREEDY).sequences, wanted)
