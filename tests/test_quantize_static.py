"""Caches in few bits on steps that text has fixed, against the rows that they stand for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from evidence import evidence_for
from handmade import Shape, cached_llama
from selection import one_in
from test_edits import said, text
from tiny import in_int8

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, run, verify
from graftwork.ir.ops.quantized_cache import hadamard, static_codes
from graftwork.ir.plan import DraftRecord, NoDraft
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.quantize_cache import QuantizeCache
from graftwork.passes.caching.quantize_static import QuantizeStatic
from graftwork.passes.caching.read_sparse import ReadSparse
from graftwork.passes.drafting.recycling import RecyclingDraft
from graftwork.passes.drafting.suffix import SuffixDraft
from graftwork.passes.engine.base import Outcome
from graftwork.passes.engine.feed import empty_inputs
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.add_top_tokens import AddTopTokens

G = torch.ops.graftwork
SHAPE = Shape(layers=2, context=160)


def outcome(draft: DraftRecord | None = None, shape: Shape = SHAPE, **options: Any) -> Outcome:
    program = AddTopTokens().run(in_int8().run(cached_llama(shape)).program).program
    program = with_plan(program, draft=draft or NoDraft())
    wanted = {"windows": 4, "length": 64, **options}
    made = QuantizeStatic(**wanted).apply(program, evidence_for(program, 4096))
    verify(made.program)
    return made


def static(draft: DraftRecord | None = None, **options: Any) -> Program:
    return outcome(draft, **options).program


def test_codes_are_the_nearest_steps_within_reach():
    x = torch.tensor([[[[-9.0, 0.1, 1.4, 2.6], [0.0, 0.9, 99.0, 0.4]]]])
    step, least = torch.tensor([[1.0, 0.5, 1.0, 0.1]]), torch.tensor([[-2.0, 0.0, 0.0, 0.0]])
    assert static_codes(x, step, least, bits=8).tolist() == [[[[0, 0, 1, 26], [2, 2, 99, 4]]]]
    # Two to a byte, the first half of a row below: 15 at most.
    assert static_codes(x, step, least, bits=4).tolist() == [
        [[[16, 15 * 16], [15 * 16 + 2, 4 * 16 + 2]]]
    ]
    with pytest.raises(InputError, match="an even width"):
        static_codes(x[..., :3], step[:, :3], least[:, :3], bits=4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("turned", [True, False])
def test_attention_is_that_over_the_rows_which_codes_stand_for(bits, turned):
    program = static(bits=bits, turned=turned)
    fn = program.step.copy()
    outputs = {}
    for n, attend in enumerate(fn.calls(G.attend_quantized.default)):
        scaled = attend.args[0].args[0]
        outputs[f"q.{n}"] = scaled.args[0] if turned else scaled
        for part, place in (("key", 1), ("value", 3)):
            outputs[f"{part}.{n}"] = attend.args[place]
        outputs[f"mask.{n}"] = attend.args[5]
        whole = next(iter(next(iter(attend.users)).users))
        outputs[f"out.{n}"] = next(iter(whole.users)) if turned else whole
    fn.set_outputs(outputs)
    watched = program.with_function(fn)
    found = run(watched, fn.name, empty_inputs(watched, fn.name, torch.tensor([text(1, 40)])))
    for n in range(2):
        rows = {}
        for part in ("key", "value"):
            codes, base = found[f"{part}.{n}"], f"kv.{n}.{part}"
            codes = torch.cat([codes & 15, codes >> 4], -1) if bits == 4 else codes
            step, least = (program.weights[f"{base}.{w}"].load() for w in ("step", "least"))
            values = codes.float() * step[:, None] + least[:, None]
            rows[part] = hadamard(values) if turned else values
        want = G.attend(found[f"q.{n}"], rows["key"], rows["value"], found[f"mask.{n}"], scale=0.25)
        torch.testing.assert_close(found[f"out.{n}"], want, rtol=1e-4, atol=1e-4)


def test_what_text_does_not_reach_is_clipped_and_told():
    def told(clip: float) -> float:
        (remark,) = outcome(clip=clip).remarks
        return float(re.findall(r"([0-9.]+)%", remark)[0])

    assert told(0.0) == 0.0
    assert 14 < told(0.1) < 22  # a tenth of every channel's numbers at each end, but for equal ones


def test_caches_take_less_than_with_steps_of_rows():
    program = static(bits=4)
    assert {str(s.type) for s in program.states.values()} == {"u8[B,2,C,8]"}


@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.long)])
@pytest.mark.parametrize("draft", one_in(2, [SuffixDraft(tokens=5), RecyclingDraft(nodes=7)]))
def test_drafts_batches_and_earlier_calls_change_nothing(draft, backend):
    prompts = [text(1, 70), text(2, 12) * 3, text(4, 9)]
    plain, target = static(), Target(backend, threads=1)
    wanted = [said(compile(plain, target), p, tokens=30)[0][0] for p in prompts]
    fast = compile(static(draft), target)
    got, stats = said(fast, *prompts, tokens=30)
    assert got == wanted
    assert stats.accepted_tokens > 2
    longer = prompts[0] + wanted[0] + text(7, 11)
    again, stats = said(fast, longer, tokens=10)
    assert again == said(compile(plain, target), longer, tokens=10)[0]
    assert stats.reused_tokens >= 90


@pytest.mark.parametrize(
    ("change", "shape", "says"),
    [
        (None, {"softcap": 5.0}, "bounds its scores"),
        (None, {"sinks": True}, "has sinks"),
        (None, {"dim": 12}, "power of two"),
        (QuantizeCache(), {}, "in few bits already"),
        (EvictCache(budget=32, block=8), {}, "cache=evict.* already"),
    ],
)
def test_what_cannot_have_steps_of_text_is_refused(change, shape, says):
    made = cached_llama(Shape(**shape))
    made = made if change is None else change.run(made).program
    with pytest.raises((PassError, InputError), match=says):
        QuantizeStatic(windows=2, length=32).apply(made, evidence_for(made, 4096))


def test_rows_on_steps_of_text_are_dropped_by_nothing():
    with pytest.raises(PassError, match="reads what is not a cache's rows"):
        EvictCache(budget=32, block=8).run(static())
    with pytest.raises(PassError):
        ReadSparse(pick="attention", rows=8, picks=1).run(static())
