"""Rows that a batch shares are held and read once, and texts stay what they are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given
from hypothesis import strategies as st
from selection import mostly_long, on_backends
from test_kept_conversations import MODELS
from test_own_attention import node
from test_runtime_cached import padded
from test_shared_prompts import GREEDY, PROMPT, SAMPLED, batches
from tiny import tiny_llama

from graftwork.backends import Target, compile
from graftwork.backends.torch import cpu
from graftwork.ir import PassError, Program
from graftwork.ir.check.legality import unmet
from graftwork.ir.ops.attention import attend
from graftwork.ir.ops.shared import attend_part, merge_parts
from graftwork.ir.plan import NoDraft
from graftwork.model import Model
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.share_prefix import SharePrefix
from graftwork.passes.engine.manager import run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.recipe import Recipe
from graftwork.runtime import generate
from graftwork.runtime.cache.conversations import Conversations

HELD = "shared.held"


def parts_of(seed: int, width: int, rows: int, kind: str) -> dict[str, Any]:
    """Operands of attention over rows of which tokens see some, and some tokens none."""
    made = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, width, 16, generator=made)
    k, v = (torch.randn(2, 2, rows, wide, generator=made) for wide in (16, 24))
    mask = torch.rand(2, 1, width, rows, generator=made) < 0.4
    mask[0, 0, seed % width] = False
    bias = torch.randn(2, 4, width, rows, generator=made) if "bias" in kind else None
    sinks = torch.randn(4, generator=made) if "sinks" in kind else None
    return {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "sinks": sinks}


@given(
    st.integers(0, 99),
    st.sampled_from((1, 5, 20)),
    st.sampled_from((1, 20, 37)),
    st.sampled_from(("", "bias", "sinks cap")),
)
def test_kernels_give_a_part_and_its_weight_as_the_op_says(seed, width, rows, kind):
    of, softcap = parts_of(seed, width, rows, kind), 3.0 if "cap" in kind else None
    got = cpu.OWN["attend_part"](*of.values(), scale=0.25, softcap=softcap)
    want = attend_part(*of.values(), scale=0.25, softcap=softcap)
    for mine, meant in zip(got, want, strict=True):
        torch.testing.assert_close(mine, meant, rtol=1e-4, atol=1e-4)
    for one, other in zip(node("AttendPart", of, softcap=softcap or 0.0), got, strict=True):
        assert torch.equal(one, other)


@given(st.integers(0, 99), st.integers(1, 19), st.sampled_from(("", "bias", "sinks")))
def test_parts_together_are_the_whole(seed, cut, kind):
    of = parts_of(seed, 3, 20, kind)
    of["mask"][..., seed % 20] = True
    whole = attend(*of.values(), scale=0.3)
    parts = []
    for rows in (slice(0, cut), slice(cut, 20)):
        bias = None if of["bias"] is None else of["bias"][..., rows]
        sinks = of["sinks"] if rows.start == 0 else None
        some = of["k"][:, :, rows], of["v"][:, :, rows], of["mask"][..., rows]
        parts += attend_part(of["q"], *some, bias, sinks, scale=0.3)
    torch.testing.assert_close(merge_parts(*parts), whole, rtol=1e-4, atol=1e-5)


def sharing(name: str) -> Program:
    return SharePrefix().run(MODELS[name]()).program


def held(executable: Any) -> int:
    return int(executable.read_rows([HELD], 0, 0, 1)[HELD])


@pytest.mark.parametrize(
    ("name", "backend"),
    on_backends(
        ("suffix", "recycling", "eagle chain"),
        everywhere=("suffix",),
        rare=("eagle chain",),
    ),
)
def test_texts_are_those_of_each_alone(name: str, backend: str) -> None:
    check_texts(name, backend, batches())


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "recycling",
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("suffix", "eagle chain")),
    ],
)
def test_texts_are_those_of_each_alone_when_compiled(name: str) -> None:
    check_texts(name, "torch", {"begun alike": batches()["begun alike"]})


def check_texts(name: str, backend: str, kinds: dict[str, list[list[int]]]) -> None:
    fast = compile(sharing(name), Target(backend, threads=1))
    alone = compile(with_plan(MODELS["plain"](), draft=NoDraft()), Target(backend, threads=1))
    for prompts in kinds.values():
        Conversations.of(fast).forget()
        ids, mask = padded(prompts)
        found = generate(fast, ids, attention_mask=mask, **GREEDY)
        for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
            wanted = generate(alone, torch.tensor([prompt]), **GREEDY).sequences[0].tolist()
            assert row[len(row) - len(wanted) :] == wanted
        alike = min(len(p) for p in prompts) if prompts[0][:5] == prompts[1][:5] else 0
        if alike and name != "eagle chain":
            assert held(fast) == (50 if len(prompts) > 3 else len(PROMPT) - (alike == 70))
        # And what was shared stays for the next call.
        again = generate(fast, ids, attention_mask=mask, **GREEDY)
        assert torch.equal(again.sequences, found.sequences)
        assert not alike or again.stats.reused_tokens >= len(prompts) * 48


@pytest.mark.parametrize("kind", ["window", "sinks softcap"])
def test_windows_count_positions_and_sinks_weigh_once(kind: str) -> None:
    shape = Shape(context=160, window=24) if kind == "window" else None
    program = cached_llama(shape or Shape(context=160, sinks=True, softcap=4.0))
    draw = random.Random(1)
    begun = [draw.randrange(2, 61) for _ in range(60)]
    prompts = [[*begun, n, n + 1] for n in range(3, 6)]
    for backend in ("eager", "onnxruntime"):
        fast = compile(SharePrefix().run(program).program, Target(backend, threads=1))
        found = generate(fast, torch.tensor(prompts), **GREEDY).sequences
        assert held(fast) == 60
        wanted = generate(compile(program, Target("eager")), torch.tensor(prompts), **GREEDY)
        assert torch.equal(found, wanted.sequences)


@pytest.mark.parametrize("name", mostly_long(["layerskip", "swift", "medusa"], ["swift"]))
def test_recipes_that_draft_share_rows_too(name: str) -> None:
    """In segments, without sublayers, by heads; whether or not a draft pays."""
    extended = {"title": name, "contract": "lossless", "extends": name, "passes": ["share_prefix"]}
    steps = [s for s in Recipe.load(extended).steps if s.pass_.name != "length_goodput"]
    program, start = run_passes(tiny_llama(4, context=192), steps)[0], tiny_llama(4, context=192)
    plain = run_passes(start, Recipe.load("baseline").steps)[0]
    ids = torch.tensor([[*PROMPT, n, 2] for n in range(1, 4)])
    found = generate(compile(program, Target("eager", threads=1)), ids, **GREEDY)
    wanted = generate(compile(plain, Target("eager", threads=1)), ids, **GREEDY)
    assert torch.equal(found.sequences, wanted.sequences)
    assert found.stats.draft_tokens > 20 and found.stats.shared_tokens == 3 * len(PROMPT)


def test_samples_share_the_rows_of_their_prompt() -> None:
    """In 128 rows for eight texts, and not in 1,024 (there are 64 at least)."""
    found = {}
    for name, program in (("each", MODELS["plain"]()), ("once", sharing("plain"))):
        executable = compile(program, Target("onnxruntime", threads=1))
        said = generate(executable, torch.tensor([PROMPT]), num_return_sequences=8, **SAMPLED)
        found[name] = said.sequences, executable.state_bytes()
    assert torch.equal(found["once"][0], found["each"][0])
    assert found["once"][1] < 0.65 * found["each"][1]
    assert held(executable) == len(PROMPT) - 1


def test_calls_of_other_kinds_see_nothing_of_it() -> None:
    fast = compile(sharing("plain"), Target("onnxruntime", threads=1))
    fresh = compile(MODELS["plain"](), Target("onnxruntime", threads=1))
    same = torch.tensor([PROMPT] * 2)
    other = torch.tensor([PROMPT[::-1], PROMPT[3:] + PROMPT[:3]])
    for ids in (same, other, same[:1], same, other[:1], torch.cat([other, same])):
        found = generate(fast, ids, **GREEDY).sequences
        assert torch.equal(found, generate(fresh, ids, **GREEDY).sequences)
        assert (held(fast) > 0) == torch.equal(ids, same)


def test_a_saved_prefix_is_held_once(tmp_path) -> None:
    fast = Model(sharing("plain"), Target("eager", threads=1), {"name": "test"})
    fast.save_prefix(torch.tensor(PROMPT), tmp_path / "prefix")
    fast.forget()
    fast.load_prefix(tmp_path / "prefix")
    prompts = [[*PROMPT, n, 2] for n in range(1, 4)]
    found = fast.generate(torch.tensor(prompts), **GREEDY)
    assert found.stats.reused_tokens == 3 * len(PROMPT) and found.stats.shared_tokens == 0
    assert held(fast.executable) == len(PROMPT)
    fresh = compile(MODELS["plain"](), Target("eager"))
    assert torch.equal(found.sequences, generate(fresh, torch.tensor(prompts), **GREEDY).sequences)


def test_what_cannot_be_shared_is_refused() -> None:
    program = cached_llama()
    with pytest.raises(PassError, match="the plan has cache=shared"):
        SharePrefix().run(SharePrefix().run(program).program)
    with pytest.raises(PassError, match="the plan has cache=evict"):
        SharePrefix().run(EvictCache(budget=32, block=8).run(program).program)
    missed = SharePrefix().run(QuantizeCache().run(program).program)
    assert missed.matches == 0 and "no attention reads a cache" in missed.near_miss
    fault = unmet(SharePrefix().run(MODELS["eagle"]()).program)
    assert fault is not None and "holds rows that texts share apart" in fault[0]
