"""SpecDec++: a trained head ends drafts where it expects a rejection; the text stays the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import named, tiny_llama

from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import PassError, Program, UnsupportedError, Weight
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import CachedDraft, NoDraft, UnrolledDraft
from graftwork.model import Model
from graftwork.passes.caching.insert_kv_cache import InsertKvCache
from graftwork.passes.drafting.draft_hydra import DraftHydra
from graftwork.passes.drafting.draft_medusa import DraftMedusa
from graftwork.passes.drafting.length_acceptance import LengthAcceptance
from graftwork.passes.engine.base import Pass
from graftwork.passes.engine.manager import Step, run_passes
from graftwork.passes.stepping.add_argmax import AddArgmax
from graftwork.passes.stepping.pick_logits import PickLogits
from graftwork.runtime import generate
from graftwork.training import fit
from graftwork.training.objectives.acceptance import agreements
from graftwork.training.objectives.base import Batch

PROMPTS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


def bounded(draft: Pass, odds: list[float] | None = None, **options: Any) -> Program:
    """A tiny model whose drafts a head bounds; odds: what the head says, whatever it sees."""
    passes = (draft, LengthAcceptance(levels=4, **options))
    passes += (InsertKvCache(), PickLogits(), AddArgmax())
    program = run_passes(tiny_llama(vocab=16), [Step(p) for p in passes])[0]
    if odds is None:
        return program
    bias = Weight.of("acceptance.head.bias", torch.tensor(odds))
    return program.replace(weights=program.weights.replacing(bias))


def decode(executable: Any) -> Any:
    options = {"max_new_tokens": 24, "eos_token_id": [], "return_dict_in_generate": True}
    return generate(executable, PROMPTS, **options)


@pytest.mark.parametrize(
    ("odds", "length"),
    [
        ([9.0, 9.0, 9.0, 9.0], 4),
        ([9.0, 9.0, -9.0, 9.0], 3),  # the level that fails is still drafted, as in the paper
        ([0.0, 0.0, 0.0, 0.0], 2),  # 1 - 0.5 is below 0.7, 1 - 0.25 above
        ([-9.0, 9.0, 9.0, 9.0], 1),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_drafts_end_where_a_rejection_is_likely(
    odds: list[float], length: int, backend: str
) -> None:
    executable = compile(bounded(DraftMedusa(heads=4), odds), Target.parse(backend))
    result = decode(executable)
    plan = replace(executable.program.plan, draft=NoDraft())
    assert torch.equal(result.sequences, decode(Planned(executable, plan)).sequences)
    # The first draft, before any state is known, has all levels; the last ones lack room.
    whole = result.stats.sequence_steps * length + 2 * (4 - length)
    assert whole - 2 * (1 + 2 + 3 + 4) <= result.stats.draft_tokens <= whole


def test_copied_drafts_are_bounded_too() -> None:
    program = bounded(named("draft_suffix", tokens=4, shortest=1), [-9.0] * 4)
    result = decode(compile(program, Target.parse("eager")))
    assert 0 < result.stats.draft_tokens <= result.stats.sequence_steps + 2 * 3


def test_it_learns_where_the_drafter_is_right(tmp_path: Path) -> None:
    text = [[(i * i + j) % 16 for i in range(90)] for j in range(12)]
    model = Model(bounded(DraftMedusa(heads=3)), Target("eager", "cpu"), {"name": "test"})
    options = {"steps": 160, "batch": 4, "window": 32, "own": 0.5, "rate": 3e-2}
    seen: list[tuple[float, ...]] = []
    fitted = fit(model, text, out=tmp_path, progress=lambda s: seen.append(s.hits), **options)
    # The heads' three accuracies, then the policy's: it gets better while what it judges does too.
    # At the first level it has least to go by.
    hits = np.array([row for row in seen if len(row) == 6])
    early, late = hits[:20].mean(0), hits[-20:].mean(0)
    assert len(fitted.hits) == 6 and late[3:].min() > 0.6
    assert (late[4:] > early[4:] + 0.05).all()
    assert fitted.model.program.plan.length.trained
    loaded = bounded(DraftMedusa(heads=3), weights=str(tmp_path))
    name = "acceptance.head.weight"
    assert torch.equal(loaded.weights[name].load(), fitted.model.program.weights[name].load())
    assert loaded.plan.length.trained


def test_an_unrolled_model_is_judged_as_the_model() -> None:
    """The chain that one call makes is the one that its levels make one by one."""
    draft, tokens = CachedDraft("draft", levels=2), torch.randint(0, 9, (2, 12))
    logits = torch.randn(2, 12, 9)

    def run(function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        assert function == "draft" and list(inputs) == ["tokens"]
        return {"draft_logits": logits.roll(1, 0)}

    batch = Batch(tokens, {}, logits)
    alone, chain = (agreements(d, run, batch, 4) for d in (draft, UnrolledDraft(draft)))
    assert len(alone) == 2 and all(map(torch.equal, alone, chain))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="never asked: nothing drafts"):
        run_passes(tiny_llama(), [Step(LengthAcceptance())])
    model = Model(bounded(DraftHydra(heads=2)), Target("eager", "cpu"), {"name": "test"})
    with pytest.raises(UnsupportedError, match="not for draft=recurrent"):
        fit(model, [[1, 2, 3] * 30] * 4, out=tmp_path, steps=1, batch=1, window=16, own=0.0)
