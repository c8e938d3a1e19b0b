"""The target's own first layers draft: the same text, and no layer runs twice for a token."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, Weight, WeightStore
from graftwork.ir.executable import Executable
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.draft_exit import DraftExit
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
CUT = CutDepth(exits=(1, 3))
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "own head": (DraftExit(exit=3, levels=3), CUT),
    "shared head": (DraftExit(exit=1, levels=4, own_head=False), CUT),
    "confidence": (DraftExit(exit=3), CUT, named("length_confidence", threshold=0.1)),
    "goodput": (DraftExit(exit=1), CUT, named("length_goodput")),
    "after copies": (named("draft_suffix", shortest=1), DraftExit(exit=3, levels=3), CUT),
    "int8": (DraftExit(exit=3, levels=3), CUT, in_int8()),
}


def made(*passes: Pass, start: Program | None = None) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(start or tiny_llama(4), [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str = "", int8: bool = False) -> Executable:
    passes = DRAFTS[which] if which else [in_int8()] * int8
    return compile(made(*passes), Target(backend, "cpu"))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("which", DRAFTS)
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    plain, fast = compiled(backend, "", which == "int8"), compiled(backend, which)
    for rows in (slice(0, 4), slice(2, 3)):
        ids, mask = PROMPTS[rows], MASK[rows]
        expected = generate(plain, ids, attention_mask=mask, **ASKED)
        found = generate(fast, ids, attention_mask=mask, return_dict_in_generate=True, **ASKED)
        assert torch.equal(found.sequences, expected)
        assert found.stats.draft_tokens > 0


def agreeing() -> Program:
    """A model whose last layer adds nothing, so that an exit before it says what the model says."""
    program = tiny_llama(4)
    nothing = {"layers.3.o", "layers.3.down"}
    weights = {
        name: Weight.of(name, torch.zeros_like(old.load())) if name in nothing else old
        for name, old in program.weights.items()
    }
    return program.replace(weights=WeightStore(weights))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_an_exit_that_agrees_is_accepted_whole(backend: str) -> None:
    passes = (DraftExit(exit=3, levels=3, own_head=False), CutDepth(exits=(3,)))
    fast = compile(made(*passes, start=agreeing()), Target(backend, "cpu"))
    plain = compile(made(start=agreeing()), Target(backend, "cpu"))
    asked = {**ASKED, "max_new_tokens": 25}  # the prompts' own, and six steps of four
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, generate(plain, PROMPTS, attention_mask=MASK, **asked))
    assert found.stats.accepted_per_step == 4.0
    assert found.stats.steps == 6


def test_no_layer_runs_twice_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of n drafted tokens: n + 1 calls of the first layers on a token each, and one of the
    others on all of them."""
    passes = (DraftExit(exit=3, levels=3, own_head=False), CutDepth(exits=(3,)))
    fast = compile(made(*passes, start=agreeing()), Target("eager", "cpu"))
    calls: Counter[tuple[str, int]] = Counter()
    run = fast.run

    def counted(function: str, inputs: Any, fetch: Any) -> Any:
        if "positions" in inputs and "past" in inputs:
            calls[function, inputs["positions"].shape[1]] += 1
        return run(function, inputs, fetch)

    monkeypatch.setattr(fast, "run", counted)
    generate(fast, PROMPTS[2:3], **{**ASKED, "max_new_tokens": 25})
    steps = 6
    assert calls["step.0", 1] == 4 * steps and calls["step.1", 4] == steps
    prompt = PROMPTS.shape[1]
    assert set(calls) == {("step.0", 1), ("step.1", 4), ("step.0", prompt), ("step.1", prompt)}


def test_sampled_texts_keep_their_distribution() -> None:
    """Rejection sampling against the exit's own distribution, over many short texts."""
    asked: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "eos_token_id": []}
    ids = PROMPTS[2:3].expand(400, -1)
    counts = []
    for which in ("", "own head"):
        texts = generate(compiled("eager", which), ids, seed=11, temperature=0.7, **asked)
        counts.append(torch.bincount(texts[:, -1], minlength=32).double())
    plain, fast = counts
    often = (plain + fast) >= 10
    chi = ((plain - fast) ** 2 / (plain + fast).clamp(min=1))[often].sum()
    free = int(often.sum()) - 1
    assert free >= 5 and chi < free + 4 * (2 * free) ** 0.5


def test_the_step_must_be_cut_where_the_draft_ends() -> None:
    with pytest.raises(PassError, match=r"needs a step that is cut after 3 layers.*cut_depth"):
        made(DraftExit(exit=3))
    with pytest.raises(PassError, match=r"cut after 2 layers; it is cut after 1, 3"):
        made(DraftExit(exit=2), CUT)
    with pytest.raises(PassError, match="layer"):
        made(DraftExit(exit=7), CUT)
    with pytest.raises(PassError, match="one node a level"):
        made(DraftExit(exit=3), CUT, AcceptTrees(), named("tree_best_first"))
