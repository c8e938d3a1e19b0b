"""What leaving layers out costs a real model, and how much of that training makes up for.

    python benchmarks/healing.py MODEL --data TEXT.jsonl --text NAME=FILE [--text NAME=FILE ...]
        --prompts PROMPTS.jsonl --out FOLDER [--points "RECIPE PASS.OPTION=VALUE; ..."]
        [--ways none,full,lora] [--steps N] [--minutes 30] [--batch 2] [--window 256] [--lora 16]
        [--target onnxruntime:cpu:float32] [--count 8] [--tokens 32] [--threads 2]
        --json F [--svg F] [--markdown F]

A cell is a point, a recipe with settings, in one way: as the model is ("none"), with all its
weights trained to say what all layers said ("full"), or adapters of rank `lora` ("lora"). Recipes
whose own weights are trained (heads at exits, routers) have those trained in any way but "none",
and the model stays as it is. Training reads `data`, and none of the texts; checkpoints lie in
`out`, where a run that was interrupted goes on. What stands in `json` is not measured again:

    layers      share of the layers that a token of the prompts' texts runs through
    NAME        of each text, on 1,024 tokens by the path that generates: KL(whole || recipe) in
                nats a token, perplexity over the whole model's with its standard error, and the
                share of the likeliest tokens that are the same
    same, kept  prompts whose text is the whole model's own, and the share of its tokens before the
                first other one (greedy, `tokens` new tokens of `count` prompts)
    speed       tokens a second over the whole model's, in turns, median of the prompts
    steps       of training, `batch` windows of `window` tokens each, and its minutes

A line of PROMPTS.jsonl has ``text``, or token ids under the name of the model's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from real import documents, prompts_of, rounded, write

import graftwork as gw
from graftwork.backends import Target
from graftwork.backends.tiles import kernel_name
from graftwork.data.cost import Remembered, cost_of
from graftwork.measuring.agreement import OwnText
from graftwork.recipe import Recipe
from graftwork.training.heal import heals

POINTS = (
    "skip_layers skip_layers.count=1; skip_layers skip_layers.count=3; "
    "skip_layers skip_layers.count=6; unified_skipping skip_layers.speedup=1.25; "
    "skipdecode depth_linear.least=0.75"
)
WAYS = ("none", "full", "lora")
PREDICTED = 1024
"""Tokens of each text that are predicted."""


class Bench:
    """The whole model, which every cell is set beside."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.path = args, args.model
        self.target = Target.parse(args.target, threads=args.threads)
        self.whole = gw.optimize(self.path, "baseline", target=self.target)
        self.reading = Remembered(self.whole)
        self.prompts = prompts_of(args.prompts, self.whole, self.path.stem, args.count)
        self.texts = {}
        for said in args.text:
            label, _, file = said.partition("=")
            self.texts[label] = documents(Path(file), self.whole, PREDICTED)

    def made(self, point: str, way: str) -> tuple[gw.Model, dict[str, Any]]:
        """A cell's model, and how it was trained."""
        name, *settings = point.split()
        recipe = replace(Recipe.load(name).with_options(settings), knob=None)
        if way == "none":
            return gw.optimize(self.path, recipe, target=self.target), {}
        args, out = self.args, self.args.out / re.sub(r"[^\w.]+", "-", f"{point} {way}")
        start = time.perf_counter()
        options = {name: getattr(args, name) for name in ("steps", "minutes", "batch", "window")}
        options |= {"resume": (out / "training" / "state.json").exists(), "progress": told}
        if heals(recipe):
            options |= {"lora": args.lora if way == "lora" else 0, "lessons": args.out / "lessons"}
            done = gw.heal(self.path, recipe, args.data, out=out, **options)
            model = gw.optimize(done.folder, done.recipe, target=self.target)
        else:
            options["resume"] = (out / "state.json").exists()
            plain = gw.optimize(self.path, recipe, target=self.target)
            done = gw.fit(plain, args.data, out=out, **options, own=0.0)
            model = done.model
        minutes = (time.perf_counter() - start) / 60
        return model, {"steps": done.steps, "minutes": minutes}

    def cell(self, point: str, way: str) -> dict[str, Any]:
        """A row."""
        row: dict[str, Any] = {"point": point, "way": way, "kernels": kernel_name()}
        made, trained = self.made(point, way)
        row |= trained
        for label, ids in self.texts.items():
            found = cost_of(made, self.reading, ids)
            row[label] = found.model_dump(exclude={"text", "speed", "tokens"})
        texts, rates, layers = [], [], []
        for model in (self.whole, made):  # pages are touched
            write(model, self.prompts[0], 4)
        for prompt in self.prompts:
            found = [write(model, prompt, self.args.tokens) for model in (self.whole, made)]
            texts.append([each.sequences[0, prompt.shape[1] :].tolist() for each in found])
            one, other = (each.stats for each in found)
            rates.append(other.tokens_per_second / one.tokens_per_second)
            layers.append(other.layers / one.layers)
        own = OwnText.of(texts)
        row |= {"same": own.equal, "texts": own.texts, "kept": own.share}
        row |= {"layers": statistics.mean(layers), "speed": statistics.median(rates)}
        row["example"] = made.tokenizer.decode(texts[0][1])
        return row


def told(state: Any) -> None:
    """Progress, a line a step."""
    if state.step:
        print(f"step {state.step}, loss {state.loss:.4f}", flush=True)


def short(value: float) -> str:
    """Of a ratio, which has no bounds where a model writes garbage."""
    return f"{value:.3f}" if value < 1000 else f"{value:.0e}"


def cost(found: dict[str, float]) -> str:
    """A text's figures."""
    ratio = f"{short(found['ratio'])} ± {short(found['error'])}"
    return f"{found['divergence']:.3f}, {ratio}, {found['agreement']:.1%}"


def markdown(rows: list[dict[str, Any]], labels: list[str]) -> str:
    """A line a cell."""
    head = ["recipe", "trained", "steps", "layers", *labels, "texts", "speed"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        costs = [cost(row[label]) for label in labels]
        name, *settings = row["point"].split()
        cells = [
            f"`{name}`, {', '.join(f'`{each}`' for each in settings)}",
            "" if row["way"] == "none" else row["way"],
            str(row.get("steps", "")),
            f"{row['layers']:.3f}",
            *costs,
            f"{row['same']}/{row['texts']} ({row['kept']:.0%})",
            f"{row['speed']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], labels: list[str], path: Path) -> None:
    """Over the share of layers, divergence and agreement on each text: a recipe has a colour, a
    way a kind of line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    styles = {"none": ("o", ":"), "full": ("s", "-"), "lora": ("^", "--")}
    titles = {"none": "as it is", "full": "all weights healed", "lora": "healed by LoRA"}
    names = list(dict.fromkeys(row["point"].split()[0] for row in rows))
    figure, axes = plt.subplots(
        2, len(labels), figsize=(1 + 4 * len(labels), 7), squeeze=False, sharex=True, sharey="row"
    )
    for column, label in enumerate(labels):
        for name, way in ((name, way) for name in names for way in styles):
            own = [r for r in rows if r["point"].split()[0] == name and r["way"] == way]
            own.sort(key=lambda row: row["layers"])
            marker, line = styles[way]
            for axis, key in zip(axes[:, column], ("divergence", "agreement"), strict=True):
                axis.plot(
                    [row["layers"] for row in own],
                    [row[label][key] for row in own],
                    marker=marker,
                    linestyle=line,
                    color=f"C{names.index(name)}",
                    markersize=5,
                    linewidth=1,
                )
        axes[0, column].set(title=label, yscale="log")
        axes[1, column].set(xlabel="share of the layers that a token runs through")
    axes[0, 0].set_ylabel("KL(whole || recipe), nats a token")
    axes[1, 0].set_ylabel("likeliest token the whole model's")
    for axis in axes.flat:
        axis.grid(visible=True, linewidth=0.3)
        axis.locator_params(axis="x", nbins=5)
    for index, name in enumerate(names):
        axes[0, 0].plot([], [], color=f"C{index}", label=name)
    for way, (marker, line) in styles.items():
        axes[0, 0].plot([], [], marker=marker, linestyle=line, color="grey", label=titles[way])
    figure.legend(loc="upper center", ncols=len(names) + len(styles), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", default=POINTS, help="by ';'")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--lora", type=int, default=16)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    ways = args.ways.split(",")
    if unknown := sorted(set(ways) - set(WAYS)):
        parser.error(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    torch.set_num_threads(args.threads)
    points = [" ".join(point.split()) for point in args.points.split(";") if point.strip()]
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    known = {(row["point"], row["way"]) for row in rows}
    left = [(point, way) for point in points for way in ways if (point, way) not in known]
    bench = Bench(args) if left else None
    for point, way in left:
        assert bench is not None
        rows.append(rounded(bench.cell(point, way)))
        print(json.dumps(rows[-1]), flush=True)
        args.json.write_text(json.dumps(rows, indent=1))
    labels = [said.partition("=")[0] for said in args.text]
    order = {each: place for place, each in enumerate((p, w) for p in points for w in WAYS)}
    rows.sort(key=lambda row: order.get((row["point"], row["way"]), len(order)))
    if args.markdown:
        args.markdown.write_text(markdown(rows, labels))
    if args.svg:
        draw(rows, labels, args.svg)


if __name__ == "__main__":
    main()
