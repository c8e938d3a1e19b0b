"""`graftwork inspect`: a program as text, counts, a picture or a page."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import out, progress
from .options import TO_WRITE, AnyModel, DataOption, MaybeRecipe, SetOption, TargetOption, require

if TYPE_CHECKING:
    from ..ir import Program

# Late imports: torch takes seconds, which `--help` does not need.


def inspect(
    model: AnyModel,
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    after: Annotated[str | None, typer.Option(help="Stop after this pass.")] = None,
    target: TargetOption = None,
    data: DataOption = None,
    summary: Annotated[bool, typer.Option(help="Counts instead of the program.")] = False,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", **TO_WRITE, help="Draw it, layers that are alike once."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--html", **TO_WRITE, help="Write a page: pictures, and what passes changed."),
    ] = None,
) -> None:
    """Print or draw a program: as traced, after a recipe, or after one of its passes."""
    require(after is None or recipe is not None, "--after needs --recipe")
    from ..artifact.destinations import check_file
    from ..artifact.saved import is_saved
    from ..drawing.changes import Watch
    from ..drawing.inspected import program_page
    from ..drawing.svg import program_svg
    from ..ir.support.scratch import write_text
    from ..model import load
    from ..optimizing import trace
    from .open_model import with_settings

    check_file(svg, "--svg")
    check_file(page, "--html")
    watch = Watch()
    with progress() as show:
        if is_saved(Path(model)) and recipe is None:
            program = load(model).program
        else:
            chosen = None if recipe is None else with_settings(recipe, set_)
            program = trace(
                model,
                chosen,
                target=target,
                after=after,
                data=data,
                progress=show,
                watch=watch if page is not None else lambda program: None,
            )
        title = " ".join(filter(None, [recipe, after and f"after {after}"]))
        if svg is not None:
            show("draw")
            write_text(svg, program_svg(program, title))
        if page is not None:
            show("draw")
            write_text(page, program_page(program, watch.found, title))
    if summary:
        _counts(program)
    elif svg is None and page is None:
        sys.stdout.write(str(program))


def _counts(program: Program) -> None:
    ops = Counter(str(node.target) for fn in program.functions.values() for node in fn.calls())
    out.print(f"{program.name}: {program.info}, stage {program.stage}", markup=False)
    out.print(f"{len(program.weights)} weights, {len(program.states)} states")
    for name, count in ops.most_common():
        out.print(f"{count:6} {name}", markup=False)
