"""`graftwork eval`: recipes beside the unchanged model, by a text or by tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import out, progress
from .options import TO_WRITE, ModelArg, SetOption, TargetOption, TextOption, listed

# Late imports: torch takes seconds, which `--help` does not need.


def evaluate(
    model: ModelArg,
    names: Annotated[
        str, typer.Option("--recipes", help="Recipes, comma-separated (default: none).")
    ] = "",
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text to predict: a file, a folder, .jsonl of texts or ids (default, "
            "without --tasks: a bundled one)."
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(help="lm-eval's tasks, comma-separated.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Examples in a task's prompt.")] = None,
    task_folder: Annotated[Path | None, typer.Option(help="A folder of tasks of yours.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Of the text, at most.")] = 24,
    length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of a window (default: 512, or 2048 where caches lose rows)."
        ),
    ] = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    data: TextOption = None,
    json_: Annotated[
        Path | None, typer.Option("--json", **TO_WRITE, help="Write the figures here.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", **TO_WRITE, help="Write a page with a picture here.")
    ] = None,
) -> None:
    """Say what recipes keep of a model and how fast they decode: perplexity and divergence on a
    text, or scores of tasks, by the path that generates."""
    from ..artifact.destinations import check_file
    from ..ir.support.scratch import write_text
    from ..measuring.evaluate import evaluate as run

    check_file(json_, "--json")
    check_file(page, "--html")
    with progress() as show:
        found = run(
            model,
            listed(names),
            text=text,
            tasks=listed(tasks),
            settings=set_,
            target=target,
            data=data,
            windows=windows,
            length=length,
            limit=limit,
            shots=shots,
            task_folder=task_folder,
            drawn=page is not None,
            progress=show,
        )
    out.print(found.table())
    if json_ is not None:
        write_text(json_, json.dumps(found.as_json(), indent=1))
    if page is not None:
        write_text(page, found.page())
