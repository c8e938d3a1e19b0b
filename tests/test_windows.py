"""Layers that look back over a sliding window, beside others whose caches lose rows.

A window's layer holds the rows that the window reaches, which changes nothing; what the others keep
is what the papers' rules keep (`test_eviction`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from handmade import Shape, cached_llama
from selection import one_in
from test_eviction import BLOCK, BUDGET, METHODS, TEXT, Reference, asked, executable_of, held_rows
from test_runtime_cached import padded

from graftwork.ir import PassError, Program, arguments, verify
from graftwork.ir.plan import DraftRecord, Evict, NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.hold_windows import HoldWindows
from graftwork.passes.caching.read_chunks import ReadChunks
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime import generate

G = torch.ops.graftwork
WINDOW, NEAR, WHOLE, LONG = 21, 0, 1, 160
SHAPE = Shape(layers=2, context=256, window=WINDOW, whole=(WHOLE,))
PLAIN = cached_llama(SHAPE)
DRAFTS, BOTH = (SuffixDraft(tokens=5), RecyclingDraft(nodes=7)), ("eager", "onnxruntime")


def evicting(name: str, budget: int = BUDGET, draft: DraftRecord | None = None) -> Program:
    program = with_plan(AddTopTokens().run(PLAIN).program, draft=draft or NoDraft())
    made = EvictCache(**{"budget": budget, "block": BLOCK, **METHODS[name]}).run(program).program
    verify(made)
    return made


@pytest.mark.parametrize(
    ("draft", "backend"),
    [*product([NoDraft()], ["eager", "onnxruntime", "torch"]), *one_in(2, product(DRAFTS, BOTH))],
)
def test_rows_beyond_a_window_are_not_missed(draft: DraftRecord, backend: str) -> None:
    """Where no other layer loses rows: tokens of the plain program, alone and in a batch, drafts
    included."""
    prompts = [TEXT[0].tolist(), TEXT[0, 9:20].tolist(), TEXT[0, 3:53].tolist()]
    ids, mask = padded(prompts)
    plain = executable_of(PLAIN)
    fast = executable_of(evicting("window", LONG, draft), backend)
    found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **asked(50))
    assert (found.stats.accepted_tokens > 10) is not isinstance(draft, NoDraft)
    for row, prompt in zip(found.sequences.tolist(), prompts, strict=True):
        wanted = generate(plain, torch.tensor([prompt]), **asked(50))[0].tolist()
        assert row[len(row) - len(wanted) :] == wanted


@pytest.mark.parametrize("whole", [(), (WHOLE,)])
def test_windows_alone_are_held(whole: tuple[int, ...]) -> None:
    """The plain program's tokens, whether or not there are layers that see all rows."""
    plain = cached_llama(replace(SHAPE, whole=whole))
    made = HoldWindows(block=16).run(plain).program
    verify(made)
    found, wanted = (generate(executable_of(p), TEXT, **asked(60)) for p in (made, plain))
    assert torch.equal(found, wanted)
    assert HoldWindows().run(cached_llama(Shape())).matches == 0


def test_a_windows_buffer_is_as_long_as_the_window() -> None:
    """Rounded up to whole blocks, and as buffers are, to 256 rows."""
    shape = replace(SHAPE, context=1024)
    made = HoldWindows(block=BLOCK).run(cached_llama(shape)).program
    assert isinstance(made.plan.cache, Evict) and made.plan.cache.budgets == (24,)
    executable = executable_of(made)
    generate(executable, TEXT.repeat(1, 8), **asked(8))
    rows = [executable.states[f"kv.{layer}.key"].shape[2] for layer in (NEAR, WHOLE)]
    assert rows[NEAR] == 256 and rows[WHOLE] >= 600


@pytest.mark.parametrize(
    ("name", "backend"),
    [("snapkv, shared", "onnxruntime"), ("keydiff", "eager"), ("snapkv", "eager")],
)
def test_the_others_keep_what_the_papers_rule_keeps(name: str, backend: str) -> None:
    reference, prompt = Reference(name, start=PLAIN), TEXT[0].tolist()
    reference.budgets[NEAR] = [SHAPE.context] * reference.groups
    wanted = reference.decode(prompt, 33)
    executable = executable_of(evicting(name), backend)
    assert generate(executable, TEXT, **asked(33))[0, len(prompt) :].tolist() == wanted
    values = reference.executable.states[f"kv.{WHOLE}.value"][0]
    values = values.repeat_interleave(reference.groups // 2, 0)
    rows = held_rows(executable, WHOLE)
    for group, held in enumerate(reference.held[WHOLE]):
        assert 0 <= len(held) - BUDGET < BLOCK
        torch.testing.assert_close(
            rows[group][: len(held)], values[group][held], atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("reader", "fewer"),
    [
        (ReadChunks(rows=256, chunk=4, block=8), 2),
        (ReadSparse(pick="attention", rows=256, picks=1), 1),
    ],
)
def test_sparse_readers_leave_windows_alone(reader: ReadChunks | ReadSparse, fewer: int) -> None:
    """What reads all rows elsewhere says what the plain program says."""
    plain = cached_llama(replace(SHAPE, layers=3, whole=(1, 2)))
    made = reader.run(plain).program
    verify(made)
    attends = [arguments(node)["mask"] for node in made.step.calls(G.attend.default)]
    assert len(made.step.calls(G.attend_rows.default)) == fewer
    assert [arguments(mask)["window"] for mask in attends] == [WINDOW] + [None] * (2 - fewer)
    found, wanted = (generate(executable_of(p), TEXT, **asked(20)) for p in (made, plain))
    assert torch.equal(found, wanted)


def test_what_cannot_be_told_apart_is_refused() -> None:
    only = cached_llama(Shape(layers=2, context=256, window=WINDOW))
    with pytest.raises(PassError, match=r"every layer of .* looks back over a sliding window"):
        EvictCache(budget=BUDGET, block=BLOCK).run(only)
