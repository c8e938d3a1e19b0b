"""STree: a tree of drafts goes through a model's recurrences in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from archs import ARCHS, build
from recurrent_archs import RECURRENT

import graftwork as gw
from graftwork.ir import PassError
from graftwork.recipe import Recipe


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("mamba2", "eager"),
        ("mamba2", "onnxruntime"),
        ("qwen3_next", "onnxruntime"),
    ],
)
def test_trees_of_a_drafting_model_change_no_text(name: str, target: str, tmp_path: Path) -> None:
    model = build(RECURRENT[name])
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    build(ARCHS["llama"]).save_pretrained(tmp_path)
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(5))
    asked = {"max_new_tokens": 24, "return_dict_in_generate": True}
    recipe = Recipe.load("stree").with_options([f"draft_model.model={tmp_path}"])
    plain = gw.optimize(model, "baseline", target=target).generate(ids, **asked)
    fast = gw.optimize(model, recipe, target=target).generate(ids, **asked)
    assert torch.equal(fast.sequences, plain.sequences)
    # Sixteen nodes a step but where a text lacks room.
    assert fast.stats.draft_tokens > 8 * fast.stats.sequence_steps


def test_a_drafter_with_recurrences_is_refused(tmp_path: Path) -> None:
    model = build(RECURRENT["mamba2"])
    model.save_pretrained(tmp_path)
    recipe = Recipe.load("stree").with_options([f"draft_model.model={tmp_path}"])
    with pytest.raises(PassError, match="take a drafter made of attention"):
        gw.optimize(model, recipe, target="eager")
