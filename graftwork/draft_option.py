"""The smaller model that a recipe is given: `optimize(draft=...)` and ``--draft``.

``first:6`` is the model's own first six layers and its head: they share weights and caches with it,
and verification goes on from where they stopped, as with the recipe layerskip.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from .ir import InputError
from .recipe import Recipe, Use

DRAFTS = ("draft_model", "length_goodput")
"""Passes that let a model draft for a recipe that does not draft itself."""

FIRST = re.compile(r"first:([1-9][0-9]{0,2})")
"""A draft that is some of the model's own layers."""

LEVELS = 4
"""Tokens that these draft at most."""


def with_draft(recipe: Recipe, model: str | Path) -> Recipe:
    """A recipe with the smaller model that it takes, a folder or a .gguf file, or first:N.

    What needs a model that writes, a drafter or a weaker one that logits are contrasted with, gets
    it; a recipe
    without a drafter gets `draft_model`, as often as it pays. Errors: `InputError` for a recipe
    that has its model already, or drafts otherwise.
    """
    passes = [step.pass_ for step in recipe.steps]
    drafter = next((p for p in passes if p.models or p.name.startswith("draft_")), None)
    if (first := FIRST.fullmatch(str(model))) is not None:
        if drafter is not None:
            raise InputError(
                f"draft={model}: the recipe {recipe.name!r} has the pass {drafter.name} already: "
                f"give a recipe without a drafter"
            )
        return replace(recipe, passes=(*recipe.passes, *_first_layers(int(first[1]))))
    takes = [e.name for e in passes if "" in e.models and e.models_are != "scoring"]
    if not takes:
        if drafter is not None:
            raise InputError(
                f"draft={model}: the recipe {recipe.name!r} has the pass {drafter.name} already, "
                f"and takes no other model: give a recipe without a drafter, or one such as "
                f"draft_model, whose model you choose"
            )
        uses = tuple(Use(name, where="draft=") for name in DRAFTS)
        recipe, takes = replace(recipe, passes=(*recipe.passes, *uses)), [DRAFTS[0]]
    return recipe.with_options(f"{name}.model={json.dumps(str(model))}" for name in takes)


def _first_layers(count: int) -> tuple[Use, ...]:
    """Passes that let a model's first layers draft, as much as pays."""
    options: dict[str, dict[str, Any]] = {
        "draft_exit": {"exit": count, "levels": LEVELS, "own_head": False},
        "cut_depth": {"exits": [count]},
        "tree_chain": {"depth": LEVELS},
        DRAFTS[-1]: {},
    }
    return tuple(Use(name, given, where="draft=") for name, given in options.items())
