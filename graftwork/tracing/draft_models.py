"""Tracing of draft models and parts of the target that a recipe's passes need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..frontends import import_masked, import_model, import_part, import_scoring
from ..ir import InputError, Program
from ..passes.engine.manager import arrange, facts_of, run_passes
from ..recipe import Recipe

IMPORTERS = {"language": import_model, "masked": import_masked, "scoring": import_scoring}
"""Of other models, see `Pass.models_are`."""


def check_paths(recipe: Recipe) -> None:
    """Check the paths that passes need. Errors: `InputError` naming the pass."""
    for step in recipe.steps:
        name = step.pass_.name
        for path in (*step.pass_.models, *step.pass_.files):
            if path and not Path(path).exists():
                raise InputError(f"{name}: there is no {path}")
        if "" in step.pass_.files:
            raise InputError(
                f"recipe {recipe.name!r} needs a file: set the option path of {name} to one "
                f"(--set {name}.path=FILE)"
            )
        if "" in step.pass_.models:
            raise InputError(
                f"recipe {recipe.name!r} needs another model: set the option model of {name} to a "
                f"checkpoint folder or .gguf file (--set {name}.model=PATH)"
            )


def with_draft_models(
    program: Program,
    recipe: Recipe,
    dtype: torch.dtype,
    progress: Callable[[str], None] = lambda stage: None,
    source: Any = "",
) -> Program:
    """Add the models that the recipe's passes need, with weights in `dtype`, and parts of `source`
    that importers omit. Errors: `InputError`, `UnsupportedError` if tracing fails."""
    paths = dict.fromkeys(path for step in recipe.steps for path in step.pass_.models)
    recipes = {p: name for step in recipe.steps for p, name in step.pass_.model_recipes.items()}
    importer = {p: step.pass_.models_are for step in recipe.steps for p in step.pass_.models}
    guests = {}
    for path in paths:
        progress(f"trace {path}")
        guest = IMPORTERS[importer[path]](path, dtype=dtype)
        guests[path] = _canonical(guest)
        if path in recipes:
            guests[path] = _drafting(guests[path], guest, recipes[path])
    for part in dict.fromkeys(part for step in recipe.steps for part in step.pass_.parts):
        progress(f"trace {part}")
        guests[part] = _canonical(import_part(source, part, dtype))
    return program.replace(guests={**program.guests, **guests}) if guests else program


def _canonical(program: Program) -> Program:
    """Run the baseline passes up to "canonical", so that later passes apply as to the target."""
    steps = arrange(Recipe.load("baseline").steps, facts_of(program))
    end = next(i for i, step in enumerate(steps) if "canonical" in step.pass_.provides)
    return run_passes(program, steps[: end + 1])[0]


def _drafting(canonical: Program, traced: Program, name: str) -> Program:
    """The canonical model with the drafter of a recipe."""
    made, _ = run_passes(traced, Recipe.load(name).steps)
    draft = made.plan.draft
    weights = [made.weights[w] for w in sorted(draft.weights)]
    plan = replace(canonical.plan, draft=draft)
    return canonical.replace(plan=plan, weights=canonical.weights.adding(*weights))
