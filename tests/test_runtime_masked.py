"""First and last layers that draft by mask tokens: the same text, one call a draft, learning."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from selection import on_backends
from test_runtime_skipping import same_texts
from test_training import TEXT
from tiny import PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.model import Model
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.drafting.s3d.graph import DraftS3d
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.accept_trees import AcceptTrees
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.training import fit

ASKED: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
AROUND = (CutDepth(middle=0.5), DraftS3d(masks=3))
DRAFTS: dict[str, tuple[Pass, ...]] = {
    "chain": (*AROUND, named("tree_chain", depth=3)),
    "tree": (AcceptTrees(), *AROUND, named("tree_best_first", nodes=6, depth=4, width=3)),
    "after copies": (named("draft_suffix", shortest=1), *AROUND),
    "in int8": (*AROUND, in_int8()),
    "cache in int8": (*AROUND, named("quantize_cache", bits=8)),
}


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(4), [Step(p) for p in every])[0]


@cache
def compiled(backend: str, which: str, drafts: bool) -> Executable:
    plain = tuple(p for p in DRAFTS[which] if p.name.startswith("quantize"))
    return compile(made(*(DRAFTS[which] if drafts else plain)), Target(backend, "cpu", threads=1))


@pytest.mark.parametrize(
    ("which", "backend"), on_backends(DRAFTS, {"chain"}, rare=["after copies", "cache in int8"])
)
def test_the_text_is_the_targets_own(which: str, backend: str) -> None:
    assert same_texts(compiled(backend, which, False), compiled(backend, which, True))


def test_a_draft_goes_to_the_end_of_the_context() -> None:
    plain, fast = compiled("eager", "chain", False), compiled("eager", "chain", True)
    asked = {**ASKED, "max_new_tokens": plain.program.info.context - PROMPTS.shape[1]}
    expected = generate(plain, PROMPTS[2:3], **asked)
    assert torch.equal(generate(fast, PROMPTS[2:3], **asked), expected)


def test_one_call_of_the_outer_layers_drafts_all_tokens() -> None:
    """Drafts by hand, what the columns say when layers 1 and 2 are left out, against the text."""
    fast, prompt = compiled("eager", "chain", True), PROMPTS[2:3]
    found = generate(fast, prompt, return_dict_in_generate=True, **ASKED)
    text, program = found.sequences, fast.program
    drafting = program.plan.draft.functions  # type: ignore[attr-defined]
    masks = program.info.vocab_size + torch.arange(3)
    fast.begin(1, 64)
    place, accepted, steps = prompt.shape[1], 0, 0
    while place < text.shape[1] - 1:
        # All rows but that of the last token, from which a draft starts.
        feed(fast, program.plan.step.parts, text[:, :place], 0)
        said = feed(fast, drafting, torch.cat([text[:, place], masks])[None], place)
        room = min(3, text.shape[1] - place - 2)
        alike = (said[0, :room].argmax(-1) == text[0, place + 1 : place + 1 + room]).int()
        count = int(alike.cumprod(0).sum())
        place, accepted, steps = place + count + 1, accepted + count, steps + 1
    assert found.stats.accepted_tokens == accepted > 0
    assert found.stats.steps == steps


def feed(fast: Executable, parts: tuple[str, ...], tokens: torch.Tensor, past: int) -> torch.Tensor:
    count = tokens.shape[1]
    places = torch.arange(count)[None]
    given = {"tokens": tokens, "positions": past + places, "past": torch.tensor([past])}
    given["select"] = places
    made: dict[str, torch.Tensor] = {}
    for part in parts:
        fn = fast.program.function(part)
        fetch = ("logits",) if "logits" in fn.outputs else ()
        made = fast.run(part, {k: v for k, v in given.items() if fn.has_input(k)}, fetch)
    return made["logits"].clone()


def test_masks_learn_and_the_target_stays(tmp_path: Path) -> None:
    program = made(*AROUND, named("tree_chain", depth=4))
    model = Model(program, Target("eager", "cpu"), {"name": "test"})
    states = []
    options = {"steps": 60, "batch": 6, "window": 24, "own": 0.0, "rate": 3e-2}
    done = fit(model, TEXT, out=tmp_path, progress=states.append, **options)
    hits = [state.hits for state in states if state.hits]
    assert len(hits[0]) == 3 and sum(hits[-1]) > sum(hits[0]) + 0.1
    changed = [
        name
        for name, weight in program.weights.items()
        if not torch.equal(weight.load(), done.model.program.weights[name].load())
    ]
    assert changed == ["s3d.masks"]
    again = made(CutDepth(middle=0.5), DraftS3d(masks=3, weights=str(tmp_path)))
    assert again.plan.draft.trained  # type: ignore[attr-defined]
    with pytest.raises(PassError, match=r"s3d\.masks"):
        made(CutDepth(middle=0.5), DraftS3d(masks=2, weights=str(tmp_path)))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PassError, match="segment between the first and the last"):
        made(CutDepth(exits=(2,)), DraftS3d())
    with pytest.raises((PassError, InputError), match="leave one of the two out"):
        made(*AROUND, named("depth_deferred", exit=1))
