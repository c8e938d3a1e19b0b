"""Draft heads on real backends: whatever they guess, the text is the target's own."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from selection import one_in
from tiny import MASK, PROMPTS, drafting_llama, in_int8, named

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir.execution.executable import Executable
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.draft_mlp_speculator import DraftMlpSpeculator
from graftwork.passes.drafting.draft_redrafter import DraftRedrafter
from graftwork.runtime.generation import generate
from graftwork.runtime.speculate.last_state import LastState
from graftwork.runtime.speculate.verifiers.greedy import GreedyVerifier

DRAFTERS = {
    "medusa": DraftMedusa(heads=3, candidates=4),
    "hydra": DraftHydra(heads=3, candidates=4),
    "redrafter": DraftRedrafter(candidates=4),
    "mlp_speculator": DraftMlpSpeculator(candidates=4),
}
TREES = {
    "chain": named("tree_chain", depth=3),
    "static": named(
        "tree_static", paths=((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 0, 1))
    ),
    "best_first": named("tree_best_first", nodes=9, depth=3, width=3),
}


@cache
def compiled(backend: str, drafter: str = "", tree: str = "", int8: bool = False) -> Executable:
    passes = [DRAFTERS[drafter], TREES[tree]] if drafter else []
    return compile(drafting_llama(*passes, *[in_int8()] * int8), Target(backend, "cpu"))


@pytest.mark.parametrize(
    ("drafter", "tree", "backend"), one_in(3, product(DRAFTERS, TREES, ["eager", "onnxruntime"]))
)
def test_text_is_the_targets_own(drafter: str, tree: str, backend: str) -> None:
    asked = {"max_new_tokens": 20, "eos_token_id": []}
    plain, fast = compiled(backend), compiled(backend, drafter, tree)
    expected = generate(plain, PROMPTS, attention_mask=MASK, **asked)
    found = generate(fast, PROMPTS, attention_mask=MASK, return_dict_in_generate=True, **asked)
    assert torch.equal(found.sequences, expected)
    assert found.stats.draft_tokens > found.stats.sequence_steps  # it did draft
    alone = generate(fast, PROMPTS[2:3], **asked)
    assert torch.equal(alone, expected[2:3])


def test_text_of_a_quantized_target_is_its_own() -> None:
    asked = {"max_new_tokens": 20, "eos_token_id": []}
    plain = generate(compiled("onnxruntime", int8=True), PROMPTS[2:3], **asked)
    fast = compiled("onnxruntime", "hydra", "static", int8=True)
    assert "graftwork.quantized_linear" in str(fast.program.function("hydra_0").graph) or any(
        name.endswith(".q8") for name in fast.program.function("hydra_0").weights
    )
    assert torch.equal(generate(fast, PROMPTS[2:3], **asked), plain)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_backends_draft_the_same(drafter: str) -> None:
    """The drafts themselves agree, or acceptance would differ from backend to backend."""
    asked = {"max_new_tokens": 20, "eos_token_id": [], "return_dict_in_generate": True}
    runs = [
        generate(compiled(backend, drafter, "static"), PROMPTS[2:3], **asked).stats
        for backend in ("eager", "onnxruntime")
    ]
    assert runs[0].accepted_tokens == runs[1].accepted_tokens
    assert runs[0].draft_tokens == runs[1].draft_tokens


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_first_call_of_a_draft_is_held(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors come with every draft; what is drafted is what runs would draft."""
    executable = compiled("onnxruntime", drafter, "static")
    asked = {"max_new_tokens": 30, "eos_token_id": [], "return_dict_in_generate": True}
    seen: list[tuple[list[int], list[int]]] = []

    def watched(verify):
        def spy(self, step):
            seen.append((list(step.drafts[0].tokens), step.texts[0].tokens[:]))
            return verify(self, step)

        return spy

    held: list[str] = []
    hold = executable.hold

    def noted(function, inputs, fetch):
        held.append(function)
        return hold(function, inputs, fetch)

    monkeypatch.setattr(GreedyVerifier, "verify", watched(GreedyVerifier.verify))
    monkeypatch.setattr(executable, "hold", noted)
    generate(executable, PROMPTS[2:3], **asked)
    assert len(set(held) - {"step"}) == 1
    with_held, seen[:] = seen[:], []
    monkeypatch.setattr(LastState, "owns", lambda *_: False)
    generate(executable, PROMPTS[2:3], **asked)
    assert seen == with_held and any(drafted for drafted, _ in seen)
