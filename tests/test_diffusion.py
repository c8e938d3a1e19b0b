"""Masked diffusion that drafts: the schedule and the steps by hand, the same text, learning."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Recorded, calls_of, whole
from test_front_door import ROOT
from test_runtime_cached import PROMPTS, decode, drafting, plainly
from test_runtime_sampling import assert_distributed, texts_drawn
from test_training import TEXT
from tiny import named, tiny_llama
from whole_drafters import LENGTH, SAID, Case, sampled_from

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import (
    InputError,
    PassError,
    Program,
    UnsupportedError,
    parse_program,
    program_text,
)
from graftwork.model import Model
from graftwork.passes.drafting.dflash.objective import anchors
from graftwork.passes.drafting.diffusion import DiffusionDraft, DiffusionProposer, beside, unmasked
from graftwork.passes.drafting.diffusion.graph import DraftDiffusion
from graftwork.passes.drafting.diffusion.objective import SHARE, denoising_loss, noises
from graftwork.runtime.speculate.drafters import grown
from graftwork.training import fit
from graftwork.training.objectives.base import Batch

EAGER = Target("eager", "cpu")
LEVELS, V = 5, 32
CHAIN = named("tree_chain", depth=LEVELS)


def made(tree: Any = CHAIN, start: Program | None = None, **options: Any) -> Program:
    return drafting(DraftDiffusion(levels=LEVELS, **options), tree, start)


# -- the schedule


def test_masks_are_replaced_as_the_schedule_says() -> None:
    """(alpha_s - alpha_t) / (1 - alpha_t) of what is masked at t, alpha_t = 1 - t: in each of T
    steps an equal part of all places."""
    random, steps, shape = np.random.default_rng(3), 4, (500, 40)
    masked = np.ones(shape, dtype=np.bool_)
    for left in range(steps, 0, -1):
        t, s = left / steps, (left - 1) / steps
        part = ((1 - s) - (1 - t)) / (1 - (1 - t))
        found = unmasked("ancestral", masked, np.zeros(shape, np.float32), left, random)
        assert not (found & ~masked).any()
        assert abs(found.sum() / masked.sum() - part) < 0.02
        assert abs(found.mean() - 1 / steps) < 0.01
        masked &= ~found
    assert not masked.any()


def test_the_surest_masks_are_replaced_first() -> None:
    random = np.random.default_rng(0)
    sure = np.array([[0.1, 0.9, 0.5, 0.5, 0.7]], dtype=np.float32)
    masked = np.ones((1, 5), dtype=np.bool_)
    orders = []
    for left in (3, 2, 1):
        found = unmasked("confidence", masked, sure, left, random)
        orders.append(np.flatnonzero(found[0]).tolist())
        masked &= ~found
    assert orders == [[1, 4], [2, 3], [0]]  # 2 before 3, as sure as it
    tied = unmasked(
        "confidence", np.ones((1, 4), np.bool_), np.zeros((1, 4), np.float32), 4, random
    )
    assert tied.tolist() == [[True, False, False, False]]


# -- drafts


class RecordedBlocks(Recorded, DiffusionProposer):
    """Notes what it tells."""


def told_by_hand(program: Program, text: list[int], steps: int) -> list[torch.Tensor]:
    """What each place of a draft is drawn from, every call over the whole text."""
    block, told = [V] * LEVELS, [torch.empty(0)] * LEVELS
    count = len(text)
    seen = torch.ones(count + LEVELS, count + LEVELS, dtype=torch.bool).tril()
    seen[count:, count:] = True
    for left in range(steps, 0, -1):
        outputs = whole(program, "diffusion", [*text, *block], ancestors=seen[None])
        said = outputs["draft_logits"][0, count:]
        masks = [place for place in range(LEVELS) if block[place] == V]
        for place in masks:
            told[place] = said[place]
        sure = said.log_softmax(-1).amax(-1)
        best = sorted(masks, key=lambda place: -float(sure[place]))
        for place in best[: math.ceil(len(masks) / left)]:
            block[place] = int(said[place].argmax())
    return told


@pytest.mark.parametrize("steps", [1, 3])
def test_drafts_are_denoised_as_by_hand(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(grown.PROPOSERS, "find", lambda record: RecordedBlocks)
    RecordedBlocks.notes = []
    program = made(steps=steps)
    executable = compile(program, EAGER)
    calls = calls_of(executable, monkeypatch)
    result = decode(executable, PROMPTS, 10)
    assert torch.equal(result.sequences, plainly(compile(program, EAGER), PROMPTS, 10))
    notes = RecordedBlocks.notes
    assert {len(path) for _, path, _ in notes} == set(range(LEVELS))
    drafts = sum(not path for _, path, _ in notes) / len(PROMPTS)
    assert steps * drafts <= calls.count("diffusion") <= steps * drafts + 2
    for text, path, logits in notes[::7]:
        wanted = told_by_hand(program, text, steps)[len(path)]
        torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("order", ["confidence", "ancestral"])
def test_up_to_the_end_of_the_context(order: str) -> None:
    executable = compile(made(start=tiny_llama(context=40), order=order, steps=2), EAGER)
    found = decode(executable, PROMPTS[:2], 31).sequences
    assert torch.equal(found, plainly(executable, PROMPTS[:2], 31))


def test_samples_verified_by_rejection_follow_the_targets_distribution() -> None:
    """Tokens that become known before others that precede them are drawn anew."""
    draft = DraftDiffusion(levels=4, steps=4, order="ancestral")
    case = Case((draft,), named("tree_sampled", widths=(1, 1, 1, 1)), "block_diffusion")
    program, chances = sampled_from(case)
    drawn, accepted, drafted = texts_drawn(
        compile(program, EAGER), SAID, LENGTH, (400, 3), {"eos_token_id": []}
    )
    assert_distributed(drawn, chances)
    assert 0.02 < accepted / drafted < 0.95


def test_texts_and_blocks_that_see_each_other() -> None:
    tokens, seen, ends = beside([[1, 2, 3], [4]], np.array([[8, 8], [8, 9]]), 5)
    assert tokens.tolist() == [[1, 2, 3, 8, 8], [4, 8, 9, 0, 0]] and ends.tolist() == [3, 1]
    assert seen[0].all()
    assert seen[1].astype(int).tolist() == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


# -- learning


def test_noises_are_spread_evenly() -> None:
    found = noises(9, torch.Generator().manual_seed(1))
    assert (found[::2] == 1).all()
    spread = found[1::2].sort().values
    assert torch.allclose(spread.diff(), torch.full((3,), 0.25)) and 0 < spread[0] < 0.25


def test_the_loss_by_hand() -> None:
    """Masks count 1 / t each, and known tokens nothing."""
    width, levels = 16, 3
    record = DiffusionDraft(function="diffusion", levels=levels, token=V)
    tokens = torch.randint(0, V, (2, width), generator=torch.Generator().manual_seed(5))
    teacher = torch.randn(2, width, V, generator=torch.Generator().manual_seed(6))
    fed: dict[str, torch.Tensor] = {}
    table = torch.randn(V + 1, V, generator=torch.Generator().manual_seed(7))

    def say(function: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        fed.update(inputs)
        own = table[inputs["tokens"]] * (1 + inputs["positions"][..., None])
        return {"draft_logits": own[:, inputs["select"][0]]}

    found = denoising_loss(record, say, Batch(tokens, {}, teacher))
    starts = anchors(tokens, levels, SHARE).tolist()
    blocks = fed["tokens"][:, width:].unflatten(1, (len(starts), levels))
    generator = torch.Generator().manual_seed(int(tokens.sum()))
    noise = noises(len(starts), generator)
    total, some = 0.0, 0
    for row in range(2):
        for block, start in enumerate(starts):
            for level in range(levels):
                place, token = start + level, int(blocks[row, block, level])
                if token != V:
                    assert token == tokens[row, place]
                    continue
                said = (table[V] * (1 + place)).log_softmax(-1)
                total -= float(said[tokens[row, place]] / noise[block])
                some += 1
    count = 2 * len(starts) * levels
    assert 0 < some < count and bool((blocks[:, noise == 1] == V).all())
    assert float(found.total) == pytest.approx(total / count, rel=1e-4)
    assert len(found.hits) == levels
    with pytest.raises(UnsupportedError, match="comes trained: there is nothing to train"):
        denoising_loss(replace(record, window=8), say, Batch(tokens, {}, teacher))


def test_what_is_learnt_is_accepted(tmp_path: Path) -> None:
    """A floor: of a text that the layers were trained on most of what they draft is kept."""
    model = Model(made(depth=2, steps=2), EAGER, {"name": "test"})
    options = {"steps": 80, "batch": 6, "window": 32, "own": 0.0, "rate": 1e-2}
    done = fit(model, TEXT, out=tmp_path, **options)
    before, after = (each.program.weights for each in (model, done.model))
    moved = {n for n, w in before.items() if not torch.equal(w.load(), after[n].load())}
    assert all(name.startswith("diffusion.") for name in moved) and "diffusion.mask" in moved
    again = made(depth=2, weights=str(tmp_path))
    assert again.plan.draft.trained  # type: ignore[attr-defined]
    torch.testing.assert_close(
        again.weights["diffusion.mask"].load(), after["diffusion.mask"].load()
    )


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["block_diffusion", "glide"])
def test_layers_on_embeddings_learn_in_half(recipe: str, tmp_path: Path) -> None:
    """What a norm adds up has two dtypes there: embeddings, and products in 16 bits."""
    model = gw.optimize(ROOT / "graftwork" / "demo_model", recipe, target="eager:cpu:float32")
    options = {"steps": 2, "batch": 2, "window": 32, "own": 0.0, "half": True}
    fitted = fit(model, None, out=tmp_path, **options)
    assert not fitted.model.program.plan.untaught


# -- what is refused


def test_what_is_refused() -> None:
    with pytest.raises((InputError, PassError), match="steps=6 is more than levels=5"):
        DraftDiffusion(levels=5, steps=6).run(tiny_llama())
    with pytest.raises(PassError, match="depth=3 is more than the 2 layers of tiny"):
        DraftDiffusion(depth=3).run(tiny_llama(2))
    with pytest.raises(InputError, match="window=3 is shorter than the levels=8"):
        DiffusionDraft(window=3)
    with pytest.raises(Exception, match="Input should be 'confidence' or 'ancestral'"):
        DraftDiffusion(order="random")
    from graftwork.passes.caching.insert_kv_cache import InsertKvCache
    from graftwork.passes.engine.manager import Step, run_passes

    with pytest.raises(PassError, match="function diffusion that takes ancestors"):
        run_passes(tiny_llama(), [Step(p) for p in (DraftDiffusion(), InsertKvCache(), CHAIN)])


def test_plans_read_back() -> None:
    program = made(order="ancestral")
    assert parse_program(program_text(program)).plan == program.plan
    plan = replace(program.plan.draft, steps=LEVELS)
    assert str(plan).count("steps=5") == 1
