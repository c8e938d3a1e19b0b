"""Chunks that are picked by their landmarks, against loops over rows written from the paper."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from handmade import Shape, cached_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from selection import one_in
from test_edits import said, text
from test_own_attention import node
from test_read_sparse import best
from tiny import in_int8

from graftwork.backends import compile
from graftwork.backends.onnxruntime.portable import portable
from graftwork.backends.target import Target
from graftwork.backends.torch import cpu
from graftwork.ir import InputError, PassError, Program, UnsupportedError, verify
from graftwork.ir.ops.sparse import chunk_means, chunk_rows
from graftwork.ir.plan import DraftRecord, NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.read_chunks import ReadChunks
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime.cache.conversations import read_text

SHAPE = Shape(layers=2, context=160)
FEW: dict[str, Any] = {"rows": 8, "chunk": 4, "block": 16}


def chunked(draft: DraftRecord | None = None, **options: Any) -> Program:
    # In 8 bits a row's products have the same bits whatever shares its step.
    program = AddTopTokens().run(in_int8().run(cached_llama(SHAPE)).program).program
    program = with_plan(program, draft=draft or NoDraft())
    made = ReadChunks(**{**FEW, **options}).run(program).program
    verify(made)
    return made


@settings(max_examples=30)
@given(st.integers(0, 99), st.sampled_from((1, 2, 9)))
def test_chunks_are_picked_as_by_hand_ties_included(seed, chunks):
    random = torch.Generator().manual_seed(seed)
    marks = torch.randint(-1, 2, (2, 2, 7, 2), generator=random).double()
    q = torch.randint(-2, 3, (2, 4, 3, 2), generator=random).double()
    past = torch.tensor([9, 3])  # two whole blocks of four, and none
    place = torch.arange(14)
    mask = place <= past[:, None, None, None] + torch.arange(3)[:, None]
    how = {"chunks": chunks, "chunk": 2, "block": 4, "latest": 6, "scale": 0.5}
    got = chunk_rows(q.float(), marks.float(), mask, past, **how)
    for b, g, t in ((b, g, t) for b in range(2) for g in range(2) for t in range(3)):
        begin = int(past[b]) // 4 * 4
        known = [c < begin // 2 for c in range(7)]
        logs = (q[b, 2 * g : 2 * g + 2, t] @ marks[b, g, : sum(known)].T * 0.5).log_softmax(1)
        ranks = (logs.amax(0) * 1024).round().tolist()
        picked = best(dict(enumerate(ranks)), chunks)
        want = [row for c in picked for row in ((2 * c, 2 * c + 1) if c >= 0 else (-1, -1))]
        want += [r if r <= int(past[b]) + t else -1 for r in range(begin, begin + 6)]
        assert got[b, g, t].tolist() == want


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 5), st.sampled_from((1, 2, 9)), st.booleans())
def test_kernels_pick_the_chunks_that_the_op_says(seed, width, chunks, capped):
    random = torch.Generator().manual_seed(seed)
    marks = torch.randint(-1, 2, (2, 2, 12, 6), generator=random).float()
    q = torch.randint(-2, 3, (2, 4, width, 6), generator=random).float()
    past = torch.tensor([int(torch.randint(0, 20, (), generator=random)), 3])
    mask = torch.arange(24) <= past[:, None, None, None] + torch.arange(width)[:, None]
    given = {"q": q, "marks": marks, "mask": mask, "past": past}
    how: dict[str, Any] = {"chunks": chunks, "chunk": 2, "block": 4, "latest": 6, "scale": 0.5}
    softcap = 2.0 if capped else None
    want = chunk_rows(**given, **how, softcap=softcap)
    assert torch.equal(cpu.OWN["chunk_rows"](*given.values(), **how, softcap=softcap), want)
    onnx = {**how, "softcap": softcap or 0.0}
    assert torch.equal(node("ChunkRows", given, **onnx)[0], want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"past": torch.tensor([25, 0])}, "lies outside 0..24"),
        ({"past": torch.tensor([-1, 0])}, "lies outside 0..24"),
        ({"marks": torch.zeros(2, 2, 12, 4)}, "marks must be"),
        ({"chunk": 3}, "multiple of chunk"),
        ({"latest": 3}, "latest >= block"),
        ({"chunks": 0}, "chunks >= 1"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(changes, says):
    given = {
        "q": torch.zeros(2, 4, 1, 6),
        "marks": torch.zeros(2, 2, 12, 6),
        "mask": torch.ones(2, 1, 1, 24, dtype=torch.bool),
        "past": torch.tensor([8, 0]),
        **{"chunks": 2, "chunk": 2, "block": 4, "latest": 6},
    } | changes
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    how = {name: value for name, value in given.items() if name not in tensors}
    with pytest.raises(Exception, match=says):
        node("ChunkRows", tensors, softcap=0.0, **how)
    with pytest.raises(InputError):
        cpu.OWN["chunk_rows"](*tensors.values(), **how, scale=0.5, softcap=None)


def test_landmarks_are_the_means_of_their_keys():
    keys = torch.randn(2, 2, 13, 3)
    got = chunk_means(keys, torch.tensor([12, 8]), block=4, chunk=2)
    for b, past in ((0, 12), (1, 8)):
        for chunk in range(2):
            first = past - 4 + 2 * chunk
            want = (keys[b, :, first] + keys[b, :, first + 1]) / 2
            torch.testing.assert_close(got[b, :, chunk], want)


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
def test_as_many_rows_as_there_are_change_nothing(backend):
    full = AddTopTokens().run(in_int8().run(cached_llama(SHAPE)).program).program
    prompts = text(1, 70), text(2, 33)
    wanted, _ = said(compile(full, Target(backend, threads=1)), *prompts, tokens=30)
    every, _ = said(compile(chunked(rows=160), Target(backend, threads=1)), *prompts, tokens=30)
    few, _ = said(compile(chunked(), Target(backend, threads=1)), *prompts, tokens=30)
    assert every == wanted != few


def test_what_is_held_of_whole_blocks_are_their_landmarks():
    executable = compile(chunked(), Target("eager"))
    said(executable, text(3, 60), tokens=20)  # 79 rows are fed: four blocks, and 15 more
    held = read_text(executable, 0, 79, 79)
    for layer in range(SHAPE.layers):
        keys, marks = held[f"kv.{layer}.key"], held[f"kv.{layer}.marks"]
        want = keys[:, :64].reshape(2, 16, 4, SHAPE.dim).mean(2)
        torch.testing.assert_close(marks[:, :16], want)


DRAFTS = RecyclingDraft(nodes=7), SuffixDraft(tokens=5)


@pytest.mark.parametrize(("prefill", "draft"), one_in(2, product(("full", "same"), DRAFTS)))
def test_drafts_batches_and_earlier_calls_change_nothing(prefill, draft):
    prompts = [text(1, 70), text(2, 12) * 3, text(4, 9)]
    plain = chunked(prefill=prefill)
    fast = compile(chunked(draft, prefill=prefill), Target("eager"))
    wanted = [said(compile(plain, Target("eager")), p, tokens=40)[0][0] for p in prompts]
    got, stats = said(fast, *prompts, tokens=40)
    assert got == wanted
    assert stats.accepted_tokens > 2
    for cut in (100, 64, 37):  # behind, at and before the ends of blocks
        longer = (prompts[0] + wanted[0])[:cut] + text(7, 11)
        again, stats = said(fast, longer, tokens=20)
        assert again == said(compile(plain, Target("eager")), longer, tokens=20)[0]
        # What was generated has other rows than a prompt's where prompts read all.
        assert stats.reused_tokens >= min(cut, 70 if prefill == "full" else cut)


@pytest.mark.parametrize(
    ("options", "change", "shape", "says"),
    [
        ({"chunk": 5}, None, {}, "blocks of whole chunks"),
        ({}, EvictCache(budget=32, block=8), {}, "cache=evict.* already"),
        ({}, QuantizeCache(), {}, "leave out quantize_cache"),
        ({}, None, {"chunk": 8}, "chunks of 8 positions"),
        ({}, None, {"slopes": True}, "by their distance"),
        ({"block": 128, "rows": 128}, None, {}, "more than the model's context of 96"),
    ],
)
def test_what_cannot_be_read_by_chunks_is_refused(options, change, shape, says):
    made = cached_llama(Shape(**shape))
    made = made if change is None else change.run(made).program
    with pytest.raises((PassError, ValidationError), match=says):
        ReadChunks(**{**FEW, **options}).run(made)


def test_graphs_for_other_loaders_have_no_place_for_landmarks():
    with pytest.raises(UnsupportedError, match="between steps"):
        portable(chunked())
