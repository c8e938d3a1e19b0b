"""MLPs that are left out: those that the definition says, and no other work is missing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from selection import one_in
from tiny import MASK, PROMPTS, in_int8, named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program
from graftwork.ir.execution.executable import Executable
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.passes import Pass
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.depth.cut_depth import CutDepth
from graftwork.passes.depth.mlp.graph import DepthMlp
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate

LAYERS, FIRST, LAST, WARM = 6, 1, 1, 3
ASKED: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": []}
HALVES = CutDepth(every=1, sublayers=True)
MORE: dict[str, Pass] = {
    "copies": named("draft_suffix", shortest=1),
    "int8": in_int8(),
    "cache in int8": named("quantize_cache", bits=8),
}


def made(*passes: Pass) -> Program:
    every = (*passes, InsertKvCache(), PickLogits(), AddArgmax())
    return run_passes(tiny_llama(LAYERS), [Step(p) for p in every])[0]


@cache
def skipping(similarity: float, backend: str = "eager", more: str = "") -> Executable:
    depth = DepthMlp(similarity=similarity, first=FIRST, last=LAST, warm=WARM)
    others = [MORE[more]] if more else []
    return compile(made(HALVES, depth, *others), Target(backend, "cpu", threads=1))


def generated(executable: Executable, rows: slice = slice(0, 4), **options: Any) -> Any:
    asked = {**ASKED, "return_dict_in_generate": True, **options}
    return generate(executable, PROMPTS[rows], attention_mask=MASK[rows], **asked)


def by_hand(prompt: list[int], count: int, similarity: float) -> tuple[list[int], float]:
    """Greedy tokens by the definition, segment by segment, and the layers of one in the mean."""
    executable = compile(made(HALVES), Target("eager", "cpu"))
    executable.begin(1, 64)
    found: list[int] = []
    skipped = 0
    while len(found) < count:
        tokens, past = (found[-1:], len(prompt) + len(found) - 1) if found else (prompt, 0)
        given, idle = chain_inputs(torch.tensor([tokens]), past), False
        for place in range(2 * LAYERS):
            layer, mlp = divmod(place, 2)
            asked = mlp and FIRST <= layer < LAYERS - LAST and len(found) > WARM
            if asked and idle:
                skipped += 1
                continue
            name = f"step.{place}"
            before = executable.read_rows(["stream"], 0, past, past + len(tokens))["stream"]
            fn = executable.program.function(name)
            executable.run(name, {k: v for k, v in given.items() if fn.has_input(k)}, ())
            after = executable.read_rows(["stream"], 0, past, past + len(tokens))["stream"]
            alike = torch.cosine_similarity(before, after, dim=-1)
            idle = idle or bool(asked and alike[0, -1] > similarity)
        fed = {name: given[name] for name in ("past", "select")}
        logits = executable.run("step.head", fed, ("logits",))["logits"]
        found.append(int(logits[0, -1].argmax()))
    return found, LAYERS - skipped / 2 / (count - 1)


@pytest.mark.parametrize("backend", one_in(2, ["eager", "onnxruntime"]))
@pytest.mark.parametrize("similarity", [0.0, 0.72, 0.8])
def test_mlps_are_left_out_where_the_method_says(similarity: float, backend: str) -> None:
    found = generated(skipping(similarity, backend), slice(2, 3))
    tokens, layers = by_hand(PROMPTS[2].tolist(), 20, similarity)
    assert found.sequences[0, 5:].tolist() == tokens
    assert found.stats.layers == pytest.approx(layers) and 4 < layers < LAYERS


def test_no_call_is_made_of_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, calls = skipping(0.0), []
    run = fast.run
    monkeypatch.setattr(
        fast, "run", lambda name, *given: (calls.append(name), run(name, *given))[1]
    )
    generated(fast, slice(2, 3))
    often = {name: calls.count(name) for name in set(calls)}
    # The prompt, as many tokens as always run through all, and the rest.
    assert often["step.3"] == often["step.4"] == 20
    assert often["step.5"] == often["step.7"] == often["step.9"] == 1 + WARM
    assert often["step.11"] == 20


def test_where_none_is_left_out_the_text_is_the_targets_own() -> None:
    plain = generated(compile(made(), Target("eager", "cpu")))
    assert torch.equal(generated(skipping(1.0)).sequences, plain.sequences)


@pytest.mark.parametrize("more", one_in(3, MORE))
def test_it_composes(more: str) -> None:
    """And both backends leave out the same."""
    found = [generated(skipping(0.7, backend, more)) for backend in ("eager", "onnxruntime")]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert found[0].stats.layers == found[1].stats.layers < LAYERS
    assert (found[0].stats.draft_tokens > 0) == (more == "copies")


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(PassError, match=r"set cut_depth.every=1 and cut_depth.sublayers"):
        made(CutDepth(every=1), DepthMlp())
    with pytest.raises(PassError, match=r"leaves 1 to decide and to be left out"):
        made(HALVES, DepthMlp(first=3, last=2))
    with pytest.raises(PassError, match="verifies by all layers"):
        made(named("draft_searched_skipping"), HALVES, DepthMlp(first=1, last=1))
