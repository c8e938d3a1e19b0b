"""Edited prompts that go on from the rows of the text before the edit.

In a model of one layer a row depends on its token and its position alone, so what is kept and
turned is what would have been computed: texts must be a fresh program's.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from selection import mostly_long
from test_runtime_cached import padded

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.ops.rotary import rotary, shift_rows
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.hold_windows import HoldWindows
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.caching.reuse_edited import ReuseEdited
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.runtime import generate
from graftwork.runtime.cache.conversations import Conversations, read_text
from graftwork.runtime.edits import Run, runs

ASKED: dict[str, Any] = {"return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": []}


def program(layers: int = 1, least: int = 6, **shape: Any) -> Program:
    made = cached_llama(Shape(layers=layers, context=160, **shape))
    return ReuseEdited(least=least).run(made).program


def said(executable: Any, *prompts: list[int], tokens: int = 6) -> tuple[list[list[int]], Any]:
    ids, mask = padded(prompts)
    out = generate(executable, ids, attention_mask=mask, max_new_tokens=tokens, **ASKED)
    return out.sequences[:, ids.shape[1] :].tolist(), out.stats


def fresh(made: Program, *prompts: list[int], **asked: Any) -> list[list[int]]:
    return [said(compile(made, Target("eager")), p, **asked)[0][0] for p in prompts]


def text(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 61) for _ in range(count)]


def edited(old: list[int], draw: random.Random) -> list[int]:
    """Something of a text put in, taken out or replaced, in one or two places."""
    new = list(old)
    for _ in range(draw.choice([1, 2])):
        place, gone = draw.randrange(0, len(new)), draw.choice([0, 1, 9])
        new[place : place + gone] = text(draw.randrange(10**6), draw.choice([0, 1, 7]))
    return new or [5]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("abcdefgh", "abXcdefgh", [Run(2, 3, 6)]),
        ("abcdefgh", "abefgh", [Run(4, 2, 4)]),
        ("abcdefgh", "abXYZfgh", [Run(5, 5, 3)]),
        ("abcdefghijkl", "abXcdefiXjkl", [Run(2, 3, 4), Run(9, 9, 3)]),
        ("abcdefgh", "Xbcdefgh", [Run(1, 1, 7)]),
        ("abcdefgh", "cdefgh", [Run(3, 1, 5)]),  # the first token of a text is fed
        ("abcXabcYabcZ", "abcYabcZ", [Run(7, 3, 5)]),
        ("abcdefgh", "abcdefghijk", []),
        ("abcdefgh", "hgfedcba", []),
    ],
)
def test_runs_that_an_edit_left(old, new, found):
    assert runs(list(old), list(new), 3) == found


@pytest.mark.parametrize("interleaved", [False, True])
def test_shifted_keys_are_those_of_the_later_positions(interleaved):
    x, angle = torch.randn(1, 2, 5, 8), torch.outer(torch.arange(30.0), torch.rand(3))
    cos, sin = angle.cos() * 1.3, angle.sin() * 1.3  # tables may be scaled
    how = {"interleaved": interleaved}
    before = rotary(x, cos[None, 4:9], sin[None, 4:9], **how)
    for shift in (-2, 0, 7):
        got = shift_rows(before, torch.tensor([2]), torch.tensor([shift]), cos, sin, **how)
        place = torch.tensor([4, 5, 6 + shift, 7 + shift, 8 + shift])
        want = rotary(x, cos[None, place], sin[None, place], **how)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[:, :, :2], before[:, :, :2])


@pytest.mark.parametrize("backend", mostly_long(("eager", "onnxruntime"), ("eager",)))
@pytest.mark.parametrize("window", [None, 21])
def test_of_one_layer_edited_prompts_say_what_a_fresh_program_says(backend, window):
    made, draw = program(window=window), random.Random(3)
    executable = compile(made, Target(backend, threads=1))
    texts, turned = [text(1, 50)], 0
    said(executable, texts[0])
    for _ in range(10):
        prompts = [edited(draw.choice(texts), draw)[:100] for _ in range(draw.choice([1, 3]))]
        got, stats = said(executable, *prompts)
        assert got == fresh(made, *prompts)
        turned += stats.turned_tokens
        assert stats.reused_tokens >= 0
        texts += [p + g for p, g in zip(prompts, got, strict=True)]
    assert turned > 200


@pytest.mark.parametrize("shape", [{}, {"window": 9, "whole": (1,), "sinks": True}])
def test_rows_behind_an_edit_are_the_old_ones_turned(shape):
    made, old = program(layers=3, **shape), text(5, 60)
    new = [*old[:20], 7, 8, 9, *old[25:]]
    executable = compile(made, Target("eager"))
    said(executable, old, tokens=1)
    before = read_text(executable, 0, 60, 60)
    _, stats = said(executable, [*new, 3, 4], tokens=1)
    after = read_text(executable, 0, 60, 60)
    assert (stats.turned_tokens, stats.reused_tokens) == (35, 20 + 35)
    other = compile(made, Target("eager"))
    said(other, [*new, 3, 4], tokens=1)
    computed = read_text(other, 0, 60, 60)
    cos, sin = (made.weights[name].load() for name in ("cos", "sin"))
    for name, rows in after.items():
        torch.testing.assert_close(rows[:, :23], computed[name][:, :23])
        want = before[name][None, :, 25:60]
        if name.endswith("key"):
            moved = torch.tensor([0]), torch.tensor([-2])
            want = shift_rows(want, *moved, cos, sin)
        torch.testing.assert_close(rows[None, :, 23:58], want, rtol=1e-5, atol=1e-5)
    # Deeper layers would have computed others: nobody gets this without asking.
    assert not torch.allclose(after["kv.2.value"][:, 23:58], computed["kv.2.value"][:, 23:58])
    plain = compile(cached_llama(Shape(layers=3, context=160, **shape)), Target("eager"))
    said(plain, old, tokens=1)
    assert said(plain, new, tokens=1)[1].turned_tokens == 0


def test_drafts_change_nothing_of_what_is_said_after_an_edit():
    made, old = program(layers=2), text(6, 30) * 2
    new = old[:10] + old[14:]
    found = []
    for each in (made, with_plan(made, draft=SuffixDraft(tokens=4))):
        executable = compile(each, Target("eager"))
        said(executable, old)
        found.append(said(executable, new, tokens=20)[0])
        kept = Conversations.of(executable).lying[0]
        assert kept is not None and kept.tokens[: len(new)] == new
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "shape", "says"),
    [
        (EvictCache(budget=32, block=8), {}, "cache=evict.* already"),
        (HoldWindows(block=8), {"window": 8}, "cache=evict.* already, and what it drops"),
        (QuantizeCache(), {}, "stored in few bits"),
        (ReadSparse(pick="attention", rows=8, picks=1), {}, "something else of a text"),
        (None, {"chunk": 8}, "chunks of 8 positions"),
        (None, {"slopes": True}, "by their distance"),
        (None, {"rotary": 0}, "not what a rotation"),
    ],
)
def test_rows_that_cannot_be_kept_behind_an_edit_are_refused(change, shape, says):
    made = cached_llama(Shape(layers=3, **shape))
    made = made if change is None else change.run(made).program
    with pytest.raises(PassError, match=says):
        ReuseEdited().run(made)
