"""Models by the arguments MODEL, --recipe and --set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..artifact.saved import is_saved
from ..backends.cached_library import SHARED, begin
from ..choosing import AUTO
from ..draft_option import with_draft
from ..hub.download import local
from ..ir import InputError, ModelInfo
from ..model import Model, as_target, load
from ..optimizing import optimize
from ..passes.engine.base import Effect
from ..recipe import Recipe
from .options import DRAFT


def with_settings(recipe: str, settings: Sequence[str]) -> Recipe:
    """Load a recipe by name or path and apply --set options. ``draft=FILE`` is --draft's."""
    if recipe == AUTO:
        raise InputError(
            f"the recipe {AUTO!r} is chosen by measuring, and has no options: run graftwork "
            f"optimize MODEL --recipe {AUTO} --out DIR once, and give DIR"
        )
    drafts = [one.removeprefix(DRAFT) for one in settings if one.startswith(DRAFT)]
    chosen = Recipe.load(recipe)
    for model in drafts:
        chosen = with_draft(chosen, model)
    return chosen.with_options(one for one in settings if not one.startswith(DRAFT))


def open_model(
    source: str,
    recipe: str | Recipe | None,
    settings: Sequence[str],
    target: str | None,
    show: Callable[[str], None],
    *,
    data: Path | None = None,
    known: Callable[[ModelInfo, Mapping[str, Path], bool], None] = lambda info, assets, room: None,
    runs: bool = False,
) -> Model:
    """Load a saved artifact, or optimize a checkpoint (default recipe: baseline). data: calibration
    text. known: called before tracing with the model's facts, its files, and whether texts must fit
    its context. runs: check that the device exists."""
    source = str(local(source))
    if is_saved(Path(source)):
        if recipe is not None or settings or data is not None:
            raise InputError(f"{source} is a saved artifact; its recipe cannot be changed any more")
        show("check and read")
        return load(source, target=target)
    if not isinstance(recipe, Recipe):
        recipe = with_settings(recipe or "baseline", settings)
    if runs:
        where = as_target(target)
        where.require_device()
        if where.device == "cpu" and where.backend != "eager":
            begin(SHARED)  # compiling the kernels takes as long as tracing
    drops = any(Effect.CACHE_CONTENTS in step.pass_.effects for step in recipe.steps)
    return optimize(
        *(source, recipe),
        target=target,
        data=data,
        progress=show,
        known=lambda info, assets: known(info, assets, not drops),
    )


def stored_as(
    dtype: str | None, recipe: str | None, settings: Sequence[str], target: str | None
) -> tuple[str | Recipe | None, Sequence[str], str | None]:
    """Recipe, settings and target for weights of a dtype: float32 and float16 set the target's;
    int8 and int4 append the quantization of these recipes. Errors: `InputError` for a recipe that
    quantizes weights itself."""
    if dtype is None:
        return recipe, settings, target or "onnxruntime"
    if dtype.startswith("float"):
        return recipe, settings, f"onnxruntime:cpu:{dtype}"
    chosen, model = with_settings(recipe or "baseline", settings), Recipe.load(dtype)
    base = {use.name for use in Recipe.load(model.extends).passes}
    added = tuple(use for use in model.passes if use.name not in base)
    if taken := {use.name for use in added} & {use.name for use in chosen.passes}:
        raise InputError(
            f"--dtype {dtype}: recipe {chosen.name!r} quantizes weights itself ({', '.join(taken)})"
            f"; leave --dtype out, or set the pass's options"
        )
    return replace(chosen, passes=(*chosen.passes, *added)), (), None
