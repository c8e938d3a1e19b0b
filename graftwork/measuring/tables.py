"""Tables of recipes and measurements, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..ir.plan.contract import Contract, changes
from ..recipe import Recipe
from .bench import Row


def recipe_table(recipes: Sequence[Recipe]) -> RenderableType:
    """All recipes: name, contract, what the user must bring, title."""
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "contract", "needs", "title"):
        table.add_column(column, no_wrap=column != "title")
    for recipe in recipes:
        table.add_row(recipe.name, recipe.contract, _needs(recipe), Text(recipe.title))
    return table


def recipe_panel(recipe: Recipe) -> RenderableType:
    """One recipe: title and paper, and its passes with options and contracts."""
    table = Table(box=None, pad_edge=False)
    for column in ("pass", "contract", "options"):
        table.add_column(column)
    for step in recipe.steps:
        options = ", ".join(f"{k}={v!r}" for k, v in step.pass_.model_dump().items())
        name = step.pass_.name + (" (optional)" if step.optional else "")
        table.add_row(name, step.pass_.contract.value, Text(options))
    lines = [Text(f"{recipe.name}: {recipe.title}")]
    lines += [Text(f"{name}: {text}") for name, text in recipe.said().items()]
    return Group(*lines, Text(), table)


def recipe_markdown(recipes: Sequence[Recipe]) -> str:
    """All recipes as a Markdown table."""
    lines = ["| recipe | contract | needs | what it does | source |", "|---|---|---|---|---|"]
    for recipe in recipes:
        differs = f"; differs: {recipe.differs}" if recipe.differs else ""
        source = f"{recipe.paper}{differs}"
        cells = (recipe.name, recipe.contract, _needs(recipe), recipe.title, source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _needs(recipe: Recipe) -> str:
    return ", ".join(recipe.brought) or "nothing"


def bench_table(rows: Sequence[Row], title: str) -> RenderableType:
    """Measurements; the first row is the reference."""
    reference = (
        f"\nratio and same tokens: next to {rows[0].name}; plain: next to its own plain decoding"
    )
    if any(row.own is not None for row in rows):
        reference += "; own text: of the target's, up to the first other token"
    table = Table(box=None, pad_edge=False)
    for name in ("target", "recipe"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "ratio", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("same tokens", "plain", *(["own text"] if any(r.own for r in rows) else [])):
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(
            row.target,
            row.name,
            f"{row.median:.1f}",
            f"{row.ratio:.2f}",
            "" if row.accepted is None else f"{row.accepted:.2f}",
            _same(row),
            "" if row.plain is None else str(row.plain),
            *([_own(row)] if any(r.own for r in rows) else []),
        )
    return Group(Text(title + reference), table)


def _own(row: Row) -> str:
    """Agreement of an approximate recipe with the target's text, and its first difference."""
    if row.own is None:
        return ""
    first = "" if row.own.first is None else f", first after {row.own.first:.0f}"
    return f"{row.own.share:.0%}{first}"


def _same(row: Row) -> Text:
    if row.same is None:
        return Text("")
    if changes(row.contract):
        said = "approx." if row.contract == Contract.APPROXIMATE.value else row.contract
        return Text(f"{said} {row.same.equal} of {row.same.total}")
    return Text(str(row.same), style="" if not row.same.different else "bold red")
