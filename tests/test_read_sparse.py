"""Sparse reading: which rows tokens pick, against loops over rows written from the papers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime_helpers import without_own_attention
from selection import on_backends, one_in
from test_own_attention import node
from test_quantize_cache import TOKENS, logits
from test_runtime_cached import padded
from tiny import in_int8

import graftwork as gw
from graftwork.backends import Target, compile
from graftwork.backends.torch import cpu
from graftwork.cli.demo import demo_folder
from graftwork.ir import InputError, PassError, Program, arguments, run, verify
from graftwork.ir.ops.quantized_cache import quantize_rows, stored_values
from graftwork.ir.ops.sparse import attend_rows, take_channels, top_rows, top_stored_rows
from graftwork.passes.caching.cached_rows import written
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.caching.row_labels import label_weights
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.feed import empty_inputs
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.engine.validate import reference_logits
from graftwork.passes.stepping.add_top_tokens import AddTopTokens
from graftwork.runtime import generate
from graftwork.runtime.scoring import score

G = torch.ops.graftwork
SHAPE = Shape(layers=6)
KINDS = {
    "attention": {"pick": "attention", "full": 2, "picks": 2},
    "labels": {"pick": "labels", "channels": 4},
}


def sparse(
    kind: str, rows: int = 7, shape: Shape = SHAPE, int8: bool = False, **options: Any
) -> Program:
    program = cached_llama(shape)
    program = in_int8().run(program).program if int8 else program
    reading = ReadSparse(rows=rows, **KINDS[kind], **options)
    made = reading.apply(program, evidence_for(program)).program
    verify(made)
    return made


def best(ranks: dict[int, float], rows: int) -> list[int]:
    """The rows with the largest ranks, of equal ones the later, in their order."""
    found = sorted(sorted(ranks, key=lambda r: (-ranks[r], -r))[:rows])
    return found + [-1] * (rows - len(found))


def picked_by_hand(q: Any, k: Any, mask: Any, rows: int, scale: float) -> list[int]:
    """Of one token and the heads that pick together: q [heads,D], k [C,D], mask [C]."""
    seen = [r for r in range(len(k)) if mask[r]]
    scores = [{r: float(head @ k[r]) * scale for r in seen} for head in q]
    totals = [sum(math.exp(score) for score in head.values()) for head in scores]
    if len(q) > 1:
        both = zip(scores, totals, strict=True)
        logs = [{r: x - math.log(n) for r, x in head.items()} for head, n in both]
        scores = [{r: max(head[r] for head in logs) for r in seen}]
    return best({r: round(score * 1024) for r, score in scores[0].items()}, rows)


@given(st.integers(0, 99), st.sampled_from((1, 4, 12)), st.sampled_from((2, 4)))
def test_rows_are_picked_as_by_hand_ties_included(seed, rows, picks):
    random = torch.Generator().manual_seed(seed)
    # Few different keys, of whole numbers: many rows get the very same attention.
    k = torch.randint(-1, 2, (2, 2, 9, 2), generator=random).double()
    q = torch.randint(-2, 3, (2, 4, 3, 2), generator=random).double()
    mask = torch.rand(2, 1, 3, 9, generator=random) < 0.6
    mask[..., 2] = True
    got = top_rows(q.float(), k.float(), mask, rows=rows, picks=picks, scale=0.5)
    each = 4 // picks
    for b, r, t in product(range(2), range(picks), range(3)):
        heads = q[b, r * each : (r + 1) * each, t]
        want = picked_by_hand(heads, k[b, r * 2 // picks], mask[b, 0, t], rows, 0.5)
        assert got[b, r, t].tolist() == want


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("picks", [2, 4], ids=["groups", "heads"])
def test_attention_over_picked_rows_hides_all_others(picks, extra):
    random = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 3, 8, generator=random)
    k, v = (torch.randn(2, 2, 9, wide, generator=random) for wide in (8, 6))
    rows = torch.stack([torch.randperm(9, generator=random)[:5] for _ in range(6 * picks)])
    rows = rows.reshape(2, picks, 3, 5)
    rows[..., 4] = -1
    sinks = torch.randn(4, generator=random) if extra else None
    got = attend_rows(q, k, v, rows, sinks, scale=0.3, **extra)
    for h in range(4):
        mask = torch.zeros(2, 3, 9).scatter(2, rows[:, h * picks // 4, :, :4], 1.0).bool()[:, None]
        own = None if sinks is None else sinks[h : h + 1]
        g = slice(h // 2, h // 2 + 1)
        want = G.attend(q[:, h : h + 1], k[:, g], v[:, g], mask, None, own, scale=0.3, **extra)
        torch.testing.assert_close(got[:, h : h + 1], want)


def picked_step(seed: int, width: int, count: int, picks: int = 4) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and rows, of which some are none."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 4, width, 16, generator=random)
    k, v = (torch.randn(2, 2, 21, wide, generator=random) for wide in (16, 24))
    rows = torch.rand(2, picks, width, 21, generator=random).topk(count).indices
    rows[..., 1:] = rows[..., 1:].where(torch.rand(rows.shape, generator=random)[..., 1:] < 0.8, -1)
    return q, k, v, rows


@settings(max_examples=15)
@given(
    st.integers(0, 99),
    st.integers(1, 5),
    st.integers(1, 21),
    st.sampled_from((2, 4)),
    st.sampled_from((None, 2.0)),
)
def test_kernels_read_picked_rows_as_the_op_says(seed, width, count, picks, softcap):
    of = picked_step(seed, width, count, picks)
    sinks = None if softcap is None else torch.randn(4)
    got = cpu.OWN["attend_rows"](*of, sinks, scale=0.25, softcap=softcap)
    want = attend_rows(*of, sinks, scale=0.25, softcap=softcap)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    names = dict(zip("qkv", of[:3], strict=True)) | {"rows": of[3], "sinks": sinks}
    assert torch.equal(node("AttendRows", names, softcap=softcap or 0.0)[0], got)
    alone = cpu.OWN["attend_rows"](*(x[1:] for x in of), sinks, scale=0.25, softcap=softcap)
    assert torch.equal(alone, got[1:])


@settings(max_examples=30)
@given(
    st.integers(0, 99),
    st.integers(1, 5),
    st.sampled_from((1, 6, 40, 90)),
    st.sampled_from((None, 2.0)),
    st.sampled_from((2, 6, 8, 24)),
    st.sampled_from((2, 4)),
)
def test_kernels_pick_the_rows_that_the_op_says(seed, width, rows, softcap, dim, picks):
    random = torch.Generator().manual_seed(seed)
    # Of whole numbers products are exact, and many are the same.
    q = torch.randint(-2, 3, (2, 4, width, dim), generator=random).float()
    k = torch.randint(-2, 3, (2, 2, 61, dim), generator=random).float()
    mask = torch.rand(2, 1, width, 61, generator=random) < 0.7
    mask[0, :, 0, :] = False  # a token that sees nothing
    how = {"rows": rows, "picks": picks, "scale": 0.25, "softcap": softcap}
    want = top_rows(q, k, mask, **how)
    assert torch.equal(cpu.OWN["top_rows"](q, k, mask, **how), want)
    onnx = {**how, "softcap": softcap or 0.0}
    assert torch.equal(node("TopRows", {"q": q, "k": k, "mask": mask}, **onnx)[0], want)
    for bits in (4, 8):
        codes = torch.randint(0, 256, (2, 2, 61, dim * bits // 8), generator=random)
        steps = torch.randint(-2, 3, (2, 2, 61, 2), generator=random) / 4
        given = {"q": q, "codes": codes.to(torch.uint8), "steps": steps, "mask": mask}
        want = top_stored_rows(**given, bits=bits, **how)
        assert torch.equal(cpu.OWN["top_stored_rows"](*given.values(), bits=bits, **how), want)
        assert torch.equal(node("TopStoredRows", given, bits=bits, **onnx)[0], want)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": torch.full((2, 4, 3, 4), 21)}, "index 21 lies outside 0..20"),
        ({"rows": torch.full((2, 4, 3, 4), -2)}, "lies outside 0..20"),
        ({"rows": torch.zeros(2, 1, 3, 4, dtype=torch.int64)}, "R must be a multiple of G"),
        ({"rows": torch.zeros(2, 4, 2, 4, dtype=torch.int64)}, "rows must be"),
        ({"k": torch.zeros(2, 2, 20, 16)}, "v must be"),
        ({"q": torch.zeros(2, 6, 3, 16)}, "multiple of R"),
        ({"sinks": torch.zeros(2)}, "sinks must be"),
    ],
)
def test_rows_that_do_not_fit_are_refused(changes, says):
    of = dict(zip(("q", "k", "v", "rows"), picked_step(0, 3, 4), strict=True)) | changes
    with pytest.raises(Exception, match=says):
        node("AttendRows", of)
    with pytest.raises(InputError):
        cpu.OWN["attend_rows"](**of, scale=0.25)


def test_without_own_kernels_the_ops_meaning_runs(monkeypatch):
    without_own_attention(monkeypatch)
    program = sparse("labels")
    got = logits(program, TOKENS, [6, 14], "onnxruntime")
    torch.testing.assert_close(got, reference_logits(program, TOKENS), rtol=1e-4, atol=1e-4)


def test_channels_are_those_that_make_the_most_of_products():
    program = cached_llama(SHAPE)
    windows = TOKENS[:2]
    caches = list(written(program.step, program))
    found = label_weights(program, caches, windows)
    fn = program.step.copy()
    asked = [arguments(node) for node in fn.calls(G.attend.default)]
    fn.set_outputs({"q": asked[3]["q"], "k": asked[3]["k"].args[1]})
    want = torch.zeros(2, 16)
    for window in windows:
        inputs = empty_inputs(program.with_function(fn), "step", window[None])
        seen = run(program.with_function(fn), "step", inputs)
        for head in range(4):
            for channel in range(16):
                q, k = seen["q"][0, head, :, channel], seen["k"][0, head // 2, :, channel]
                want[head // 2, channel] += (q[:, None] * k[None]).abs().mean() / 4
    torch.testing.assert_close(found[3], want)
    made = sparse("labels")
    weight = made.weights["kv.3.channels"].load()
    assert weight.shape == (2, 4) and bool((weight.diff(dim=1) > 0).all())


def read_rows(program: Program) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """By layer the rows that attention reads on `TOKENS`, and queries, keys and masks."""
    fn = program.step.copy()
    nodes = fn.calls(G.attend.default, G.attend_rows.default)
    outputs, layers = {}, {}
    for layer, attend in enumerate(nodes):
        of = arguments(attend)
        outputs |= {f"q.{layer}": of["q"], f"k.{layer}": of["k"]}
        if "rows" in of:
            outputs[f"rows.{layer}"] = layers[layer] = of["rows"]
    fn.set_outputs(outputs)
    watched = program.with_function(fn)
    inputs = {name: t.repeat_interleave(1, 0) for name, t in _fed(watched).items()}
    seen = run(watched, "step", inputs)
    return {layer: seen[f"rows.{layer}"] for layer in layers}, seen


def _fed(program: Program) -> dict[str, torch.Tensor]:
    return empty_inputs(program, "step", TOKENS[:1])


def test_layers_between_read_what_the_one_before_has_picked():
    """Yang et al. (2024): all rows in layers 0 and 1; layers 2 and 4 read all and pick."""
    rows, seen = read_rows(sparse("attention", by="heads"))
    assert sorted(rows) == [3, 5]
    causal = torch.ones(20, 20).tril().bool()
    for layer, picker in ((3, 2), (5, 4)):
        for h in range(4):
            for t in range(20):
                q, k = seen[f"q.{picker}"][0, h : h + 1, t], seen[f"k.{picker}"][0, h // 2]
                want = picked_by_hand(q.double(), k.double(), causal[t], 7, 16**-0.5)
                assert rows[layer][0, h, t].tolist() == want


@pytest.mark.parametrize(
    ("layers", "full", "picks"), [(2, 0, 1), (3, 1, 1), (4, 2, 1), (5, 2, 2), (9, 2, 2)]
)
def test_where_few_layers_see_all_rows_fewer_read_them(layers, full, picks):
    """Beside two that look back over a window. What is given stays as it is."""
    near = Shape(layers=layers + 2, window=9, whole=tuple(range(1, layers + 1)))
    outcome = ReadSparse(pick="attention", rows=7).run(cached_llama(near))
    verify(outcome.program)
    step = outcome.program.step
    reads = step.calls(G.attend.default, G.attend_rows.default)[1:-1]
    fewer = [node.target is G.attend_rows.default for node in reads]
    assert (len(step.calls(G.top_rows.default)), fewer.count(False)) == (picks, full + picks)
    assert fewer[: full + 1] == [False] * (full + 1)
    said = f"full={full} of them read all, and picks={picks}"
    assert [said in remark for remark in outcome.remarks] == [True] * (layers < 5)
    if layers < 5:
        with pytest.raises(PassError, match="leaves none to read fewer"):
            ReadSparse(pick="attention", full=2, picks=2).run(cached_llama(near))


@pytest.mark.parametrize("by", ["groups", "heads"])
def test_each_layer_picks_by_its_labels(by):
    """Yang et al. (2024): products of a few channels, keys' in 4 bits, stand for all."""
    program, picks = sparse("labels", by=by), {"groups": 2, "heads": 4}[by]
    rows, seen = read_rows(program)
    assert sorted(rows) == list(range(6))
    causal = torch.ones(20, 20).tril().bool()
    for layer in range(6):
        channels = program.weights[f"kv.{layer}.channels"].load()
        q = take_channels(seen[f"q.{layer}"], channels)
        codes = quantize_rows(take_channels(seen[f"k.{layer}"], channels), bits=4, turned=False)
        k = stored_values(*codes, 4)
        for r, t in product(range(picks), range(20)):
            asked = q[0, r * 4 // picks : (r + 1) * 4 // picks, t].double()
            keys = k[0, r * 2 // picks].double()
            want = picked_by_hand(asked, keys, causal[t], 7, 16**-0.5)
            assert rows[layer][0, r, t].tolist() == want


@pytest.mark.parametrize("target", ["eager", "onnxruntime"])
@pytest.mark.parametrize("kind", KINDS)
def test_backends_mean_what_the_interpreter_says(kind, target):
    program = sparse(kind)
    want = reference_logits(program, TOKENS)
    got = logits(program, TOKENS, [6, 1, 1, 8, 1, 3], target)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_inductor_means_what_the_interpreter_says():
    program = sparse("labels", shape=Shape(layers=1))
    want = reference_logits(program, TOKENS)
    got = logits(program, TOKENS, [19, 1], "torch")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "target"), on_backends(KINDS, ["attention"]))
def test_as_many_rows_as_there_are_change_nothing(kind, target):
    full = logits(cached_llama(SHAPE), TOKENS, [20], target)
    torch.testing.assert_close(logits(sparse(kind, 300), TOKENS, [20], target), full)
    few = logits(sparse(kind, 3), TOKENS, [20], target)
    assert float((few - full).abs().max()) > 0.01 * float(full.abs().max())


@pytest.mark.parametrize("recipe", one_in(3, ["tidaldecode", "double_sparsity", "shadowkv"]))
def test_prompts_and_steps_share_their_merged_weights(recipe):
    program = gw.optimize(demo_folder(), recipe, target="eager:cpu:float32").program
    step, prefill = (program.function(name).weights for name in ("step", "prefill"))
    assert {name for name in step ^ prefill if ".channels" not in name} == set()


@pytest.mark.parametrize(("kind", "backend"), product(KINDS, ["eager", "onnxruntime"]))
def test_prompts_read_everything_and_what_follows_does_not(kind, backend):
    """As in the papers: a prompt has the model's own logits; with prefill="same" it does not."""
    target, ids = Target(backend, threads=1), TOKENS[:1]
    full = score(compile(cached_llama(SHAPE), target), ids)
    few = compile(sparse(kind, 3), target)
    torch.testing.assert_close(score(few, ids, ids.shape[1]), full, rtol=1e-4, atol=1e-4)
    split = score(few, ids, 12)
    torch.testing.assert_close(split[:, :12], full[:, :12], rtol=1e-4, atol=1e-4)
    alike = score(compile(sparse(kind, 3, prefill="same"), target), ids, 12)
    least = 0.01 * float(full.abs().max())
    assert float((split[:, 12:] - full[:, 12:]).abs().max()) > least
    assert float((alike[:, :12] - full[:, :12]).abs().max()) > least


@pytest.mark.parametrize(
    ("kind", "draft"), one_in(3, product(KINDS, [SuffixDraft(), RecyclingDraft()]))
)
def test_drafts_change_no_token(kind, draft):
    """In int8 weights, alone and in a ragged batch."""
    program = AddTopTokens().run(sparse(kind, int8=True)).program
    plain = compile(program, Target("eager", threads=1))
    drafting = compile(with_plan(program, draft=draft), Target("eager", threads=1))
    ids, mask = padded([TOKENS[0, :6].repeat(3), TOKENS[1, :9], TOKENS[2, :1]])
    how = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = generate(plain, ids, **how)
    assert torch.equal(generate(drafting, ids, **how), want)
    alone = generate(plain, TOKENS[1:2, :9], max_new_tokens=12, do_sample=False)
    assert torch.equal(alone[0, 9:], want[1, -12:])


@pytest.mark.parametrize(
    ("program", "options", "says"),
    [
        (lambda: cached_llama(Shape(slopes=True, rotary=0)), KINDS["labels"], "ALiBi"),
        (lambda: QuantizeCache(bits=4).run(cached_llama()).program, KINDS["labels"], "in 4 bits"),
        (
            lambda: EvictCache(budget=16, block=16).run(cached_llama()).program,
            KINDS["labels"],
            "which moves rows",
        ),
        (lambda: cached_llama(), KINDS["attention"], "expected at least 5 layers"),
        (lambda: cached_llama(), {"channels": 32}, "fewer than channels=32"),
    ],
    ids=["alibi", "few bits", "evicting", "layers", "channels"],
)
def test_what_cannot_be_read_sparsely_is_refused(program, options, says):
    made = program()
    with pytest.raises(PassError, match=says):
        ReadSparse(**options).apply(made, evidence_for(made))


@pytest.mark.parametrize("kind", KINDS)
def test_what_stores_or_drops_rows_afterwards_is_refused(kind):
    with pytest.raises(PassError, match="only attention can read stored rows"):
        QuantizeCache().run(sparse(kind))
    with pytest.raises(PassError, match="reads picked rows of caches"):
        EvictCache(budget=16, block=16).run(sparse(kind))
