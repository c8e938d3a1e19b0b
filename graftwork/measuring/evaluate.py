"""`graftwork eval`: what recipes keep of a model, and what they gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..backends.target import Target
from ..data.calibration import check_documents, check_text
from ..data.cost import LONG, Remembered, cost_of
from ..data.knob import pace_of
from ..data.prompts import Prompts
from ..drawing.figures import Point, inline, require_matplotlib, scatter
from ..drawing.html import escaped, page, table
from ..ir import InputError
from ..model import Model, as_target
from ..optimizing import optimize
from ..passes.engine.base import Effect
from ..passes.engine.evidence import TextSample
from ..recipe import Recipe
from ..report import Cost
from .compare import recipes_with
from .tasks import Tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNCHANGED = "baseline"
"""The recipe that others are set beside."""
SHORT = 512
"""Tokens of a window, unless long ones show more."""


@dataclass(frozen=True)
class Evaluated:
    """A recipe's figures. cost: on the text; its `perplexity` is the recipe's own. weights: their
    bytes. speed: tokens a second when decoding, over the unchanged model's. scores: of each task,
    by metric, a value and its standard error."""

    recipe: str
    contract: str
    cost: Cost | None
    weights: int
    speed: float
    scores: Mapping[str, Mapping[str, tuple[float, float | None]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Results of `evaluate`, the unchanged model first."""

    model: str
    text: str
    rows: Sequence[Evaluated]

    def as_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        rows = [{**asdict(row), "cost": row.cost and row.cost.model_dump()} for row in self.rows]
        return {"model": self.model, "text": self.text, "rows": rows}

    def columns(self) -> list[tuple[str, list[str]]]:
        """Heads, and a cell a row."""
        rows = self.rows
        found = [("recipe", [row.recipe for row in rows])]
        if all(row.cost is not None for row in rows):
            found += [(head, [cell(row) for row in rows]) for head, cell in _OF_TEXT.items()]
        for task in rows[0].scores:
            for metric in rows[0].scores[task]:
                cells = [_score(row.scores[task][metric]) for row in rows]
                found.append((f"{task} {metric}", cells))
        found.append(("speed", [f"{row.speed:.2f}" for row in rows]))
        found.append(("weights", [f"{row.weights / 2**20:.0f} MiB" for row in rows]))
        return found

    def table(self) -> RenderableType:
        """For the terminal."""
        columns = self.columns()
        found = Table(box=None, pad_edge=False)
        for head, _ in columns:
            found.add_column(head, justify="left" if head == "recipe" else "right", no_wrap=True)
        for cells in zip(*(cells for _, cells in columns), strict=True):
            found.add_row(*cells)
        return Group(Text(self._title()), found)

    def page(self) -> str:
        """The table and the picture as one HTML file that loads nothing. Errors: see `figure`."""
        columns = self.columns()
        rows = list(zip(*(cells for _, cells in columns), strict=True))
        what = f"<p>{escaped(self._title())}</p>"
        shown = table([head for head, _ in columns], rows)
        return page(f"{self.model}: quality and speed", what, shown, inline(self.figure()))

    def figure(self) -> Figure:
        """Quality beside speed, a point a recipe: divergence on the text, or the first task's first
        score. Errors: `InputError` without matplotlib."""
        label, values = self._points()
        points = [Point(r.recipe, r.speed, v) for r, v in zip(self.rows, values, strict=True)]
        return scatter(points, "decoding speed over the unchanged model's", label)

    def _points(self) -> tuple[str, list[float]]:
        costs = [row.cost for row in self.rows]
        if all(cost is not None for cost in costs):
            label = "KL from the unchanged model (nats a token)"
            return label, [cost.divergence for cost in costs if cost is not None]
        task, scores = next(iter(self.rows[0].scores.items()))
        metric = next(iter(scores))
        return f"{task} {metric}", [row.scores[task][metric][0] for row in self.rows]

    def _title(self) -> str:
        cost = self.rows[0].cost
        title = f"{self.model}; speed of decoding over the unchanged model's"
        if cost is None:
            return title
        beside = "ratio, KL (nats a token) and top-1 beside it"
        return f"{title}; {beside}, on {cost.text} of {cost.tokens} tokens"


_OF_TEXT: dict[str, Callable[[Evaluated], str]] = {
    "perplexity": lambda row: f"{_cost(row).perplexity:.2f}",
    "ratio": lambda row: f"{_cost(row).ratio:.4f} ± {_cost(row).error:.4f}",
    "KL": lambda row: f"{_cost(row).divergence:.5f}",
    "top-1": lambda row: f"{_cost(row).agreement:.1%}",
}


def _cost(row: Evaluated) -> Cost:
    assert row.cost is not None
    return row.cost


def _score(score: tuple[float, float | None]) -> str:
    value, error = score
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def evaluate(
    model: str | Path,
    recipes: Sequence[str | Recipe],
    *,
    text: Prompts | None = None,
    tasks: Sequence[str] = (),
    settings: Sequence[str] = (),
    target: Target | str | None = None,
    data: Prompts | None = None,
    windows: int = 24,
    length: int | None = None,
    limit: int | None = None,
    shots: int | None = None,
    task_folder: Path | None = None,
    drawn: bool = False,
    progress: Callable[[str], None] = lambda stage: None,
) -> Evaluation:
    """Set recipes beside the unchanged model: what they cost a text, by the path that generates, or
    what they score in lm-eval's tasks, and how fast they decode.

    model: a checkpoint folder or a .gguf or .onnx file. text: see `read_corpus`; None: a bundled
    one, unless there are tasks. windows: of it, at most; length: their tokens (None: 512, or 2,048
    if a recipe drops rows of caches or reads some alone, which shows in long texts). tasks: names
    that lm-eval knows, or finds in `task_folder`; limit: examples of each; shots: examples in the
    prompt. data: for recipes that calibrate. settings: ``pass.option=value``, for every recipe with
    the pass. drawn: a picture is wanted of the result.

    Errors: `InputError` for an unknown recipe or task, a text that is too short, a recipe that
    refuses the model, tasks without lm-eval, or a picture without matplotlib.
    """
    if drawn:
        require_matplotlib()
    chosen = recipes_with(recipes, settings) if recipes or settings else []
    where = as_target(target)
    where.require_device()
    check_text(chosen, data)
    if text is not None:
        check_documents(text)
    if length is None:
        effects = {
            effect for recipe in chosen for step in recipe.steps for effect in step.pass_.effects
        }
        length = LONG if Effect.CACHE_CONTENTS in effects else SHORT
    if windows < 1 or length < 2:
        raise InputError(f"eval: expected windows of two tokens or more, got {windows} of {length}")
    run = Tasks(tasks, limit, shots, task_folder) if tasks else None
    plain = optimize(model, UNCHANGED, target=where, progress=progress)
    reading = Remembered(plain)
    sample = TextSample(windows, min(length, plain.program.info.context))

    def figures(made: Model) -> Evaluated:
        cost = None
        if text is not None or not tasks:
            cost = cost_of(made, reading, text, progress, sample)
        speed = 1.0 if made is plain else pace_of(made, plain)
        scores = {} if run is None else run.scores(made, progress)
        assert made.report is not None
        size = made.report.weight_bytes_after
        name, contract = str(made.recipe["name"]), made.report.contract
        return Evaluated(name, contract, cost, size, speed, scores)

    rows = [figures(plain)]
    for recipe in chosen:
        if recipe.name == UNCHANGED:
            continue
        learns = data if recipe.takes_text else None

        def show(stage: str, name: str = recipe.name) -> None:
            progress(f"{name}: {stage}")

        rows.append(figures(optimize(model, recipe, target=where, data=learns, progress=show)))
    return Evaluation(Path(model).name, "" if text is None else str(text), rows)
