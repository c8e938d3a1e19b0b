"""The picture of `graftwork bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..drawing.figures import Bar, bar_chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def bench_figure(figures: Mapping[str, Any]) -> Figure:
    """Tokens a second of every row of `bench.as_json`: the median, and the slowest and fastest
    round; behind it the ratio to the first row, and tokens a step where drafts are verified. The
    line is the first row's speed. Errors: `InputError` without matplotlib."""
    rows = figures["rows"]
    bars = [
        Bar(
            row["name"],
            row["tokens_per_second"],
            min(row["tokens_per_second_all"]),
            max(row["tokens_per_second_all"]),
            row["target"],
            _note(row),
        )
        for row in rows
    ]
    what = f"{figures['prompts']} prompts, {figures['new_tokens']} new tokens each"
    return bar_chart(bars, f"tokens a second ({what})", rows[0]["tokens_per_second"])


def _note(row: Mapping[str, Any]) -> str:
    accepted = row["accepted_per_step"]
    drafts = f", {accepted:.2f} tokens a step" if accepted is not None and accepted > 1 else ""
    return f"{row['ratio']:.2f} x{drafts}"
