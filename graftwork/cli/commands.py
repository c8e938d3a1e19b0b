"""The command line. Every command is a thin layer over `optimize`, `load` and `Bench`.

Errors are one message and exit status 2; ``--debug`` shows the traceback.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .._version import __version__
from ..ir.support.discovery import versions_of
from .calibrate import calibrate
from .chat import chat
from .console import err, out, progress
from .evaluate import evaluate
from .export import export
from .generate import generate
from .inspect import inspect
from .map import map_
from .options import (
    TO_WRITE,
    AnyModel,
    DraftOption,
    MaybeRecipe,
    ModelArg,
    RecipeOption,
    SetOption,
    TargetOption,
    TextOption,
    listed,
    require,
)
from .serve import serve
from .train import train

if TYPE_CHECKING:
    from ..model import Model

# Late imports: torch takes seconds, which `--help` does not need.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Expected errors are one message."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    arguments = list(sys.argv[1:] if args is None else args)
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        app(args=arguments)
    except BrokenPipeError:
        # The reader closed the pipe: exit without a second error at shutdown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if "--debug" in arguments or not _is_expected(error):
            raise
        err.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(2)


def _show_warning(show: Any, message: Any, category: Any, *where: Any) -> None:
    """Show graftwork's warnings in one line, others as usual."""
    from ..ir import GraftworkWarning

    if not issubclass(category, GraftworkWarning):
        show(message, category, *where)
        return
    err.print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        found = versions_of("torch", "onnxruntime", "onnxruntime-gpu", "transformers", "tokenizers")
        beside = [f"{name} {version}" for name, version in found.items()]
        print(f"graftwork {__version__} (Python {platform.python_version()}, {', '.join(beside)})")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the versions.")
    ] = False,
) -> None:
    """Make language models generate faster: rewrite their graphs, keep their outputs."""


@app.command()
def optimize(
    model: ModelArg,
    recipe: RecipeOption = "baseline",
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    draft: DraftOption = [],  # noqa: B006
    target: TargetOption = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Prompts to validate on: .txt (one a line) or .jsonl (ids or text). For recipes "
            "that calibrate: a text file, a folder of them, .jsonl or .npy of token ids."
        ),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Keep intermediate results of calibration here, to resume a killed run."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", **TO_WRITE, help="Where to save the result.")
    ] = None,
    validate: Annotated[bool, typer.Option(help="Check every pass's contract.")] = False,
    cost: Annotated[
        bool,
        typer.Option(help="Measure how far an approximate recipe's predictions are off."),
    ] = True,
    cost_on: Annotated[
        Path | None,
        typer.Option(help="Texts to measure it on: a file, or a folder (default: a bundled text)."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="By which share perplexity may rise, for recipes that leave work out."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="With --recipe auto: begin nothing else to measure after so long."),
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Refuse a recipe that decodes more slowly than the model.")
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Report only; save nothing.")] = False,
    seed: Annotated[int, typer.Option(help="Of random prompts for validation without --data.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    page: Annotated[
        Path | None, typer.Option("--html", **TO_WRITE, help="The report as a page.")
    ] = None,
) -> None:
    """Trace a model, run a recipe's passes over it, and save the result."""
    require((folder is None) == dry_run, "give either --out DIR or --dry-run")
    from ..artifact.destinations import check_file
    from ..artifact.saved import check_destination
    from ..choosing import AUTO
    from ..ir.support.scratch import write_text
    from ..optimizing import optimize as optimize_model
    from .open_model import with_settings

    check_file(page, "--html")
    if folder is not None:
        check_destination(folder)
    set_ = [*set_, *draft]
    with progress() as show:
        result = optimize_model(
            model,
            recipe if recipe == AUTO and not set_ else with_settings(recipe, set_),
            target=target,
            data=data,
            validate=validate,
            seed=seed,
            work=work,
            cost=cost_on or False,
            tolerance=tolerance,
            minutes=minutes,
            strict=strict,
            progress=show,
        )
        if cost and cost_on is None:
            _measured(result, model, show)
        if folder is not None:
            result.save(folder, progress=lambda name: show(f"save {name}"))
    if result.report is not None and page is not None:
        write_text(page, result.report.html())
    if result.report is not None and json_:
        out.print(result.report.model_dump_json(indent=1), markup=False, soft_wrap=True)
    elif result.report is not None:
        out.print(result.report)
    if folder is not None and not json_:
        out.print(f"saved in {folder}", markup=False)


def _measured(made: Model, source: str, show: Callable[[str], None]) -> None:
    """Say in the report what an approximate recipe costs, where that can be told."""
    from ..data.cost import cost_of, why_not
    from ..data.knob import pace_of
    from ..ir.plan.contract import changes
    from ..optimizing import optimize as optimize_model

    if made.report is None or not changes(made.report.contract) or made.report.cost:
        return
    if reason := why_not(made):
        show(f"what it costs is not measured: {reason}")
        return
    plain = optimize_model(source, target=made.target, progress=show)
    found = cost_of(made, plain, progress=show)
    made.tell(found.model_copy(update={"speed": pace_of(made, plain)}))


app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command("map")(map_)
app.command()(train)
app.command()(export)
app.command()(calibrate)
app.command("eval")(evaluate)


@app.command()
def bench(
    model: ModelArg,
    names: Annotated[str, typer.Option("--recipes", help="Recipes, comma-separated.")],
    against: Annotated[
        str | None,
        typer.Option(
            help="transformers, onnxruntime-genai, both, or nothing "
            "(default: transformers, where it reads the model)."
        ),
    ] = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: Annotated[
        list[str], typer.Option("--target", help="Where recipes run; repeat for several.")
    ] = [],  # noqa: B006  (typer copies it)
    data: Annotated[Path | None, typer.Option(help="Prompts: .txt or .jsonl.")] = None,
    text: TextOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts used.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds; the median counts.")] = 3,
    json_: Annotated[
        Path | None, typer.Option("--json", **TO_WRITE, help="Write the figures here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", **TO_WRITE, help="Write a picture (SVG) here.")
    ] = None,
) -> None:
    """Measure recipes against each other and against other systems, in one run."""
    from ..artifact.destinations import check_file
    from ..drawing.figures import require_matplotlib, svg_text
    from ..ir.support.scratch import write_text
    from ..measuring.compare import compare
    from ..measuring.plots import bench_figure

    check_file(json_, "--json")
    check_file(plot, "--plot")
    if plot is not None:
        require_matplotlib()
    with progress() as show:
        table, figures = compare(
            model,
            listed(names),
            None if against is None else listed(against),
            settings=set_,
            targets=target,
            data=data,
            text=text,
            prompts=prompts,
            tokens=tokens,
            repeats=repeats,
            progress=show,
        )
    _show(table, figures, json_)
    if plot is not None:
        write_text(plot, svg_text(bench_figure(figures)))


@app.command()
def tune(
    model: AnyModel,
    data: Annotated[Path, typer.Option(help="Representative prompts: .txt or .jsonl.")],
    recipe: MaybeRecipe = None,
    set_: SetOption = [],  # noqa: B006  (typer copies it)
    target: TargetOption = None,
    text: TextOption = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts used.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes of the tree.")] = None,
    file: Annotated[
        Path | None, typer.Option("--out", **TO_WRITE, help="Write the tuned recipe here (.yaml).")
    ] = None,
) -> None:
    """Measure a drafter and the target's steps, and choose the fastest draft tree."""
    from ..artifact.destinations import check_file
    from ..measuring.tuning import tune as tune_tree
    from .open_model import with_settings

    check_file(file, "--out")
    with progress() as show:
        tuned = tune_tree(
            model,
            None if recipe is None else with_settings(recipe, set_),
            data=data,
            target=target,
            text=text,
            prompts=prompts,
            tokens=tokens,
            nodes=nodes,
            progress=show,
        )
    out.print(tuned.table())
    if file is not None:
        out.print(f"written to {tuned.save(file)}", markup=False)


app.command()(inspect)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this one.")] = None,
    markdown: Annotated[bool, typer.Option(help="As a table for documents.")] = False,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Of recipe files, for editors.")
    ] = False,
) -> None:
    """List the recipes, or show one."""
    from ..measuring.tables import recipe_markdown, recipe_panel, recipe_table
    from ..recipe import Recipe
    from ..recipe import recipes as all_recipes

    if schema:
        from ..recipe_schema import recipe_schema

        print(json.dumps(recipe_schema(), indent=1))
    elif name is not None:
        out.print(recipe_panel(Recipe.load(name)))
    elif markdown:
        print(recipe_markdown(all_recipes()))
    else:
        out.print(recipe_table(all_recipes()))


@app.command()
def demo(
    json_: Annotated[
        Path | None, typer.Option("--json", **TO_WRITE, help="Write the figures here.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer prompts and one round.")] = False,
) -> None:
    """Let SmolLM2 answer, or, where it is not installed, the bundled model go on, next to
    transformers."""
    from ..artifact.destinations import check_file
    from .demo import run_demo

    check_file(json_, "--json")
    with progress() as show:
        table, figures = run_demo(progress=show, quick=quick)
    _show(table, figures, json_)


# -- helpers


def _is_expected(error: Exception) -> bool:
    from ..ir.support.errors import GraftworkError

    # `OSError`: a full disk, missing permission, ...; its message names the file.
    return isinstance(error, (GraftworkError, OSError))


def _show(table: Any, figures: Any, file: Path | None) -> None:
    from ..ir.support.scratch import write_text

    out.print(table)
    if file is not None:
        write_text(file, json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
