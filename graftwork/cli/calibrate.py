"""`graftwork calibrate`: early-exit thresholds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .console import out, progress
from .options import TO_WRITE, ModelArg, RecipeOption, SetOption, TargetOption, TextOption

# Late imports: torch takes seconds, which `--help` does not need.


def calibrate(
    model: ModelArg,
    data: Annotated[Path, typer.Option(help="Representative prompts: .txt or .jsonl.")],
    recipe: RecipeOption = "calm",
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    text: TextOption = None,
    tolerance: Annotated[
        float, typer.Option(help="Mean share of the model's own text that may be missing.")
    ] = 0.1,
    confidence: Annotated[float, typer.Option(help="Of the guarantee.")] = 0.95,
    tokens: Annotated[
        int, typer.Option(min=2, help="New tokens per prompt; later ones run all layers.")
    ] = 64,
    file: Annotated[
        Path | None,
        typer.Option("--out", **TO_WRITE, help="Write the recipe with the threshold here (.yaml)."),
    ] = None,
) -> None:
    """Find the early-exit threshold that keeps a tolerance with a given confidence."""
    from ..artifact.destinations import check_file
    from ..data.calibration import check_text
    from ..data.prompts import check_file as check_prompts
    from ..measuring.exit_thresholds import calibrate_exits, check_promise
    from ..model import as_target
    from ..optimizing import optimize
    from .open_model import with_settings

    chosen = replace(with_settings(recipe, set_), knob=None)  # this is who turns it
    check_text([chosen], text)
    check_promise(check_prompts(data) or 0, tolerance, confidence, tokens)
    check_file(file, "--out")
    as_target(target).require_device()
    with progress() as show:
        made = optimize(model, chosen, target=target, data=text, progress=show)
        found = calibrate_exits(
            made, data, tolerance=tolerance, confidence=confidence, tokens=tokens, progress=show
        )
    out.print(found.table())
    if file is not None:
        out.print(f"written to {found.save(file)}", markup=False)
