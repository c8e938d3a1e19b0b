"""Trained drafters as recipes make them: text, samples, training, artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from selection import mostly_long, one_in
from test_front_door import ROOT
from test_training import TEXT
from tiny import named
from whole_drafters import Case, assert_own_text, assert_sampled

import graftwork as gw
from graftwork.passes.drafting.chimera.graph import DraftChimera
from graftwork.passes.drafting.diffusion.graph import DraftDiffusion
from graftwork.passes.drafting.draft_clover1 import DraftClover1
from graftwork.passes.drafting.draft_eagle import DraftEagle
from graftwork.passes.drafting.draft_layers import DraftLayers
from graftwork.passes.drafting.falcon.graph import DraftFalcon
from graftwork.passes.drafting.glide.graph import DraftGlide
from graftwork.passes.drafting.hidden_transfer.graph import DraftHiddenTransfer
from graftwork.passes.drafting.mixture.graph import DraftMixture
from graftwork.passes.drafting.nested.graph import CutDraft
from graftwork.training import FitState, fit
from graftwork.training.fit import accepted_per_step
from graftwork.training.net import trainable

CAPE = named("tree_widened", depth=3)
CHAIN = named("tree_chain", depth=4)
BEST = named("tree_best_first", nodes=9, depth=3, width=3)
BLOCKS = named(
    "tree_static",
    paths=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0, 1)),
)

CASES = {
    "chimera": Case((DraftChimera(levels=3),), BEST, "chimera"),
    "clover1": Case((DraftClover1(),), BEST, "clover1"),
    "fspad": Case((DraftEagle(levels=3, sampled=True, apart=True),), BEST, "fspad"),
    "falcon": Case((DraftFalcon(levels=4, block=2),), BLOCKS, "falcon"),
    "diffusion": Case((DraftDiffusion(levels=4, steps=2),), CHAIN, "block_diffusion"),
    "glide": Case((DraftGlide(levels=3, block=3),), CAPE, "glide"),
    "mixture": Case((DraftMixture(levels=3, block=3, longest=3),), BEST, "mixture_of_attentions"),
    "hidden_transfer": Case(
        (DraftHiddenTransfer(after=4, layers=(1, 2, 2)),), BEST, "hidden_transfer"
    ),
    "layers": Case((DraftLayers(count=3, levels=3),), BEST, "s2d"),
    "nested": Case(
        (DraftLayers(count=3, levels=4),), CHAIN, "s2d", (CutDraft(exits=(1, 2), threshold=0.1),)
    ),
}
BACKENDS = ["eager", "onnxruntime:cpu:float32", "torch:cpu:float32"]


@pytest.mark.parametrize(
    ("backend", "name"), [*one_in(2, ((b, n) for b in BACKENDS[:2] for n in CASES))]
)
def test_text_is_the_targets_own(backend: str, name: str) -> None:
    assert_own_text(CASES[name], backend)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_compiled_text_is_the_targets_own(name: str) -> None:
    assert_own_text(CASES[name], BACKENDS[2])


@pytest.mark.parametrize("name", mostly_long(CASES, keep=()))
def test_text_of_an_int8_target_is_its_own(name: str) -> None:
    for backend in BACKENDS[:2]:
        assert_own_text(CASES[name], backend, int8=True)


@pytest.mark.parametrize("name", CASES)
def test_samples_follow_the_targets_distribution(name: str) -> None:
    assert_sampled(CASES[name])


@pytest.mark.parametrize("name", mostly_long(CASES, keep=("falcon",)))
def test_training_makes_every_level_right_more_often(name: str, tmp_path: Path) -> None:
    model, seen = CASES[name].model(), []

    def note(state: FitState) -> None:
        seen.extend([(state.loss, *state.hits)] if state.hits else [])

    options = {"batch": 4, "window": 32, "own": 1.0, "rate": 2e-2, "seed": 1, "passes": 8}
    fitted = fit(model, TEXT, out=tmp_path, steps=100, progress=note, **options)
    # One step's accuracy is of one window: means of several.
    early, late = np.array(seen[:10]).mean(0), np.array(seen[-20:]).mean(0)
    assert late[0] < early[0] and (late[1:] > 0.08 + early[1:]).all()
    changed = {
        name
        for name, weight in fitted.model.program.weights.items()
        if not torch.equal(weight.load(), model.program.weights[name].load())
    }
    draft = model.program.plan.draft
    assert changed and changed <= set(trainable(model.program, draft))  # the target stays


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_training_pays_on_the_bundled_model(name: str, tmp_path: Path) -> None:
    """The loss falls, more is accepted than by the untrained drafter, and an artifact keeps it."""
    source, recipe = ROOT / "graftwork" / "demo_model", gw.Recipe.load(CASES[name].recipe)
    model = gw.optimize(source, recipe, target="eager:cpu:float32")
    losses: list[float] = []

    def note(state: FitState) -> None:
        losses.extend([state.loss] if state.hits else [])

    options = {"steps": 100, "batch": 4, "window": 96, "own": 0.5, "rate": 2e-3}
    fitted = fit(model, None, out=tmp_path / "heads", progress=note, **options)
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    lines = (source / "prompts.jsonl").read_text().splitlines()[:4]
    rows = [model.tokenizer.encode(json.loads(line)["text"]).ids for line in lines]
    assert accepted_per_step(fitted.model, rows) > 0.1 + accepted_per_step(model, rows)
    fitted.model.save(tmp_path / "artifact")
    again = gw.load(tmp_path / "artifact", target="eager:cpu:float32")
    ids = torch.tensor([rows[0][:12]])
    wanted = fitted.model.generate(ids, max_new_tokens=24)
    assert torch.equal(again.generate(ids, max_new_tokens=24), wanted)
