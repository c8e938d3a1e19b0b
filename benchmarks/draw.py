"""Draws what other benchmarks wrote as JSON lines.

    python benchmarks/speculation.py ... --json RUN.jsonl
    python benchmarks/draw.py speculation RUN.jsonl --out speculation.svg
    python benchmarks/step_cost.py ... > STEPS.jsonl
    python benchmarks/draw.py steps STEPS.jsonl --out steps.svg

speculation: each recipe's speed next to plain decoding on the same target, a bar, with the tokens
that a step yields beside it; the line is plain decoding. steps: milliseconds of a step by its
columns, a line a recipe, both axes logarithmic.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FASTER, SLOWER = "#2a7f62", "#b3543f"


def speculation(rows: list[dict[str, Any]]) -> Figure:
    """Bars, the slowest recipe at the bottom; a panel a target."""
    drafted = [row for row in rows if row["vs_plain"] is not None and row["recipe"] != "baseline"]
    targets = list(dict.fromkeys(row["target"] for row in drafted))
    height = 0.32 * len(drafted) + 0.9 * len(targets)
    figure, axes = plt.subplots(
        len(targets), 1, figsize=(7, height), squeeze=False, layout="constrained"
    )
    for target, (axis,) in zip(targets, axes, strict=True):
        shown = sorted((r for r in drafted if r["target"] == target), key=lambda r: r["vs_plain"])
        names = [Path(row["recipe"]).stem for row in shown]
        ratios = [row["vs_plain"] for row in shown]
        colours = [FASTER if ratio >= 1 else SLOWER for ratio in ratios]
        bars = axis.barh(names, ratios, color=colours)
        labels = [f"{row['vs_plain']:.2f}x, {row['tokens_per_step']:.2f} a step" for row in shown]
        axis.bar_label(bars, labels, padding=3, fontsize=8)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=target, xlabel="speed over plain decoding", xlim=(0, 1.35 * max(ratios)))
    return figure


def steps(rows: list[dict[str, Any]]) -> Figure:
    """Lines over the widths."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for row in rows:
        widths = [int(width) for width in row["median_ms"]]
        axis.plot(widths, list(row["median_ms"].values()), marker="o", label=row["recipe"])
    axis.set(xscale="log", yscale="log", xlabel="columns of a step", ylabel="milliseconds")
    axis.set_xticks(widths, [str(width) for width in widths])
    axis.grid(visible=True, which="both", linewidth=0.3)
    axis.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["speculation", "steps"])
    parser.add_argument("lines", type=Path, nargs="+", help="what the benchmark wrote")
    parser.add_argument("--out", type=Path, required=True, help=".svg, .png or .pdf")
    args = parser.parse_args()
    texts = [line for path in args.lines for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in texts if line.startswith("{")]
    if not rows:
        sys.exit(f"{', '.join(map(str, args.lines))}: expected JSON lines, and there are none")
    figure = speculation(rows) if args.what == "speculation" else steps(rows)
    figure.savefig(args.out)
    print(f"drawn: {args.out}")


if __name__ == "__main__":
    main()
