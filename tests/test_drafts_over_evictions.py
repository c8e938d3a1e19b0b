"""Drafters with caches of their own over a target that drops rows of its cache: theirs stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import mostly_long
from test_runtime_cached import PROMPTS, decode, with_itself
from test_serving_engine import alone, served
from tiny import named, tiny_llama

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import GraftworkError, PassError, Program, parse_program, program_text
from graftwork.ir.check.legality import unmet
from graftwork.ir.plan import Evict
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.evict_cache import EvictCache
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.chimera.graph import DraftChimera
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.drafting.glide.graph import DraftGlide
from graftwork.passes.drafting.nested.graph import CutDraft
from graftwork.passes.drafting.unroll_draft import UnrollDraft
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.engine.plan_edits import with_plan
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits

METHODS: dict[str, dict[str, Any]] = {
    "window": {"method": "window", "positions": "cache"},
    "snapkv": {"method": "snapkv", "recent": 6},
    "h2o": {"method": "h2o"},
    "pyramid": {"method": "snapkv", "recent": 6, "layers": "pyramid"},
}
MODEL = DraftModel(model="same", levels=5)
DRAFTERS: dict[str, tuple[Pass, tuple[Pass, ...]]] = {
    "model": (MODEL, ()),
    "tree of a model": (MODEL, (named("tree_best_first", nodes=6, depth=3, width=2),)),
    "staged": (DraftModel(model="same", levels=5, drafter="suffix(tokens=4)"), ()),
    "one call a draft": (MODEL, (UnrollDraft(),)),
    "chimera": (DraftChimera(levels=3), (named("tree_best_first", nodes=6, depth=3, width=2),)),
    "nested": (MODEL, (CutDraft(exits=(1,), threshold=0.15),)),
    "eagle": (DraftEagle(), (named("tree_best_first", nodes=6, depth=3, width=2),)),
}
LONG = [(PROMPTS[0] * 6)[:41], PROMPTS[3] * 2]
COUNT = 90


def passes(method: str | None) -> list[Step]:
    evict = [] if method is None else [EvictCache(budget=24, block=8, **METHODS[method])]
    return [Step(p) for p in (InsertKvCache(), AcceptTrees(), PickLogits(), AddArgmax(), *evict)]


def drafting(drafter: str, method: str | None, context: int = 256) -> Program:
    draft, after = DRAFTERS[drafter]
    steps = [Step(draft), *passes(method), *(Step(p) for p in after)]
    return run_passes(with_itself(context=context), steps)[0]


def plainly(method: str, count: int, context: int = 256) -> torch.Tensor:
    """What the target writes that loses rows, without drafts."""
    program = run_passes(tiny_llama(context=context), passes(method))[0]
    return decode(compile(program, Target("eager")), LONG, count).sequences


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("drafter", mostly_long(DRAFTERS, keep=("nested", "eagle")))
def test_the_text_is_that_of_the_target_alone(drafter: str, method: str, backend: str) -> None:
    result = decode(compile(drafting(drafter, method), Target.parse(backend)), LONG, COUNT)
    assert torch.equal(result.sequences, plainly(method, COUNT))
    assert result.stats.draft_tokens > 200
    assert result.stats.accepted_tokens > 40 or drafter == "eagle"  # whose layer knows nothing


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["nested", "eagle"])
def test_compiled_text_is_that_of_the_target_alone(drafter: str) -> None:
    executable = compile(drafting(drafter, "snapkv"), Target.parse("torch"))
    assert torch.equal(decode(executable, LONG, COUNT).sequences, plainly("snapkv", COUNT))


def test_the_order_of_cutting_and_dropping_does_not_matter() -> None:
    """The stream of a draft that is cut before is kept whole, too."""
    cut = CutDraft(exits=(1,), threshold=0.15)
    *before, evict = passes("snapkv")
    program = run_passes(with_itself(context=256), [Step(MODEL), *before, Step(cut), evict])[0]
    found, other = (
        decode(compile(p, Target("eager")), LONG, COUNT)
        for p in (program, drafting("nested", "snapkv"))
    )
    assert torch.equal(found.sequences, other.sequences)
    assert found.stats.accepted_tokens == other.stats.accepted_tokens


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_draft_keeps_every_row_and_the_target_its_budget(backend: str) -> None:
    """As many as the text has tokens, and none moved: those that a draft makes which reads that
    text beside a target that keeps all."""
    executable = compile(drafting("model", "snapkv"), Target.parse(backend))
    text = decode(executable, LONG[:1], COUNT).sequences
    whole = compile(drafting("model", None), Target.parse(backend))
    decode(whole, text.tolist(), 3)
    names = [name for name in executable.program.states if name.startswith("draft.")]
    rows = text.shape[1] - 8
    ours, theirs = (each.read_rows(names, 0, 0, rows) for each in (executable, whole))
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-5)
    room = executable.buffers.capacities
    assert room["C.1001"] >= rows > room["C"] or backend == "eager"  # which has a step of 256


def test_texts_that_outgrow_the_model_go_on_without_drafts() -> None:
    executable = compile(drafting("model", "window", context=64), Target("eager"))
    result = decode(executable, LONG, 120)
    assert torch.equal(result.sequences, plainly("window", 120, context=64))
    assert result.stats.draft_tokens > 20


def test_requests_of_a_server_and_saved_programs(tmp_path: Path) -> None:
    model = Model(drafting("model", "snapkv"), Target.parse("onnxruntime"), {"name": "t"})
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 60}
    asked = [(prompt, options) for prompt in (*LONG, LONG[0][:30])]
    wanted = alone(model, asked)
    clients, engine = served(model, asked)
    assert [client.tokens for client in clients] == wanted
    assert engine.figures.accepted_tokens > 20
    again = gw.load(model.save(tmp_path / "out"), target="onnxruntime:cpu")
    assert alone(again, asked) == wanted


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PassError, match=r"reads a row of .* for every token of the text"):
        run_passes(with_itself(context=256), [Step(DraftGlide()), *passes("snapkv")])
    program = drafting("model", "snapkv")
    assert isinstance(program.plan.cache, Evict) and program.plan.cache.drafts == "C.1001"
    text = program_text(program)
    late = text.replace("C.1001", "C").replace('drafts="C"', 'drafts="C.1001"')
    fault = unmet(parse_program(late, weights=program.weights))
    assert fault is not None and "run the passes that make drafts first" in fault[0]
    fault = unmet(with_plan(program, cache=replace(program.plan.cache, drafts="")))
    assert fault is not None and "draft inside the step (unroll_draft, fuse_draft)" in fault[0]
    with pytest.raises(GraftworkError, match="expected names such as"):
        parse_program(text.replace('drafts="C.1001"', 'drafts="C"'), weights=program.weights)
