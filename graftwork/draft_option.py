"""The smaller model that a recipe is given: `optimize(draft=...)` and ``--draft``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from .ir import InputError
from .recipe import Recipe, Use

DRAFTS = ("draft_model", "length_goodput")
"""Passes that let a model draft for a recipe that does not draft itself."""


def with_draft(recipe: Recipe, model: str | Path) -> Recipe:
    """A recipe with the smaller model that it takes, a folder or a .gguf file.

    What needs a model, a drafter or a weaker one that logits are contrasted with, gets it; a recipe
    without a drafter gets `draft_model`, as often as it pays. Errors: `InputError` for a recipe
    that has its model already, or drafts otherwise.
    """
    passes = [step.pass_ for step in recipe.steps]
    takes = [each.name for each in passes if "" in each.models]
    if not takes:
        other = next((p for p in passes if p.models or p.name.startswith("draft_")), None)
        if other is not None:
            raise InputError(
                f"draft={model}: the recipe {recipe.name!r} has the pass {other.name} already, and "
                f"takes no other model: give a recipe without a drafter, or one such as "
                f"draft_model, whose model you choose"
            )
        uses = tuple(Use(name, where="draft=") for name in DRAFTS)
        recipe, takes = replace(recipe, passes=(*recipe.passes, *uses)), [DRAFTS[0]]
    return recipe.with_options(f"{name}.model={json.dumps(str(model))}" for name in takes)
