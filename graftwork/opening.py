"""What the command line's MODEL, --recipe and --set mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .artifact import is_saved
from .ir import InputError
from .model import Model, load, optimize
from .recipe import Recipe


def with_settings(recipe: str, settings: Sequence[str]) -> Recipe:
    """A recipe by name or path, with --set options laid over it."""
    return Recipe.load(recipe).with_options(settings)


def open_model(
    source: str,
    recipe: str | None,
    settings: Sequence[str],
    target: str | None,
    show: Callable[[str], None],
) -> Model:
    """A saved artifact, or a checkpoint folder optimized on the spot (baseline by default)."""
    if is_saved(Path(source)):
        if recipe is not None or settings:
            raise InputError(f"{source} is a saved artifact; its recipe cannot be changed any more")
        show("check and read")
        return load(source, target=target)
    return optimize(
        source, with_settings(recipe or "baseline", settings), target=target, progress=show
    )
