"""Plots by matplotlib (extra ``plot``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir.support.errors import InputError
from ..ir.support.packages import installing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A name at a place. series: of one colour."""

    name: str
    x: float
    y: float
    series: str = ""


@dataclass(frozen=True)
class Bar:
    """A length with the least and the largest that was measured. note: behind it."""

    name: str
    length: float
    least: float
    most: float
    series: str = ""
    note: str = ""


def require_matplotlib() -> type[Figure]:
    """Its `Figure`. Errors: `InputError` without it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"pictures need matplotlib: {installing('plot')}") from error
    return Figure


def scatter(points: Sequence[Point], x: str, y: str) -> Figure:
    """Points with their names; of a divergence (KL) the smallest are on top. Errors: see
    `require_matplotlib`."""
    figure = require_matplotlib()(figsize=(6.4, 4), layout="constrained")
    axis = figure.subplots()
    for point in points:
        axis.scatter(point.x, point.y, s=28)
        axis.annotate(point.name, (point.x, point.y), (5, 4), textcoords="offset points")
    if y.startswith("KL"):
        axis.set_yscale("symlog", linthresh=1e-4)
        axis.invert_yaxis()
    axis.set(xlabel=x, ylabel=y)
    axis.margins(0.15)
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.grid(visible=True, linewidth=0.3)
    return figure


def bar_chart(bars: Sequence[Bar], x: str, reference: float) -> Figure:
    """Horizontal bars from top to bottom, a colour a series. reference: a line at that length.
    Errors: see `require_matplotlib`."""
    height = 1.1 + 0.36 * len(bars)
    figure = require_matplotlib()(figsize=(7.2, height), layout="constrained")
    axis = figure.subplots()
    series = list(dict.fromkeys(bar.series for bar in bars))
    for kind in series:
        places = [i for i, bar in enumerate(bars) if bar.series == kind]
        chosen = [bars[i] for i in places]
        spread = [
            [bar.length - bar.least for bar in chosen],
            [bar.most - bar.length for bar in chosen],
        ]
        lengths = [bar.length for bar in chosen]
        axis.barh(
            places, lengths, 0.62, xerr=spread, label=kind, error_kw={"lw": 0.9, "capsize": 2}
        )
    for i, bar in enumerate(bars):
        axis.annotate(bar.note, (bar.most, i), (6, 0), textcoords="offset points", va="center")
    axis.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axis.invert_yaxis()
    axis.axvline(reference, color="grey", linewidth=0.8)
    axis.set_xlabel(x)
    axis.margins(x=0.18)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axis.legend(frameon=False)
    return figure


def inline(figure: Figure) -> str:
    """A figure as SVG within a page."""
    text = svg_text(figure)
    return text[text.index("<svg") :]


def svg_text(figure: Figure) -> str:
    """A figure as an SVG file."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()
