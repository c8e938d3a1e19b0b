"""Every recipe on real models: does it build, what does it keep, what does it save.

    python benchmarks/real.py MODEL [MODEL ...] --text NAME=FILE [--text NAME=FILE ...]
        --prompts PROMPTS.jsonl [--calibration FILE] [--corpus FILE.json] [--recipes A,B,...]
        [--target onnxruntime:cpu:float32] [--count 8] [--tokens 64] [--rounds 3] [--threads 2]
        --json F [--svg F] [--markdown F]

MODEL: a checkpoint folder or a .gguf file. Every recipe of every model is a cell, in a process of
its own beside the plain model (`baseline`); what stands in `json` is not measured again. A cell:

    made        seconds of `optimize`
    weights     bytes, over the plain model's
    caches      bytes of the states after the prompts, likewise
    same        prompts whose text is the plain model's own, and the share of its tokens before the
                first other one (greedy, `tokens` new tokens of `count` prompts)
    accepted    tokens a step
    speed       tokens a second over the plain model's, in turns, median of the rounds
    NAME        of each text: KL(plain || recipe) in nats a token, perplexity over the plain model's
                with its standard error, and the share of the likeliest tokens that are the same, on
                windows of 256 tokens by the path that generates

or why there is none: what the recipe says that refuses, or what it needs that nobody gave. Drafts
whose weights need training are untrained here: they show that the text stays, not what they gain.

A line of PROMPTS.jsonl has ``text``, or token ids under the name of the model's folder or file.
`calibration` is read by recipes that ask for text, `corpus` by those that draft from one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import graftwork as gw
from graftwork.backends import Target
from graftwork.data.cost import cost_of
from graftwork.measuring.agreement import OwnText
from graftwork.recipe import Recipe, recipes

TOKENS = 4 * 256
"""Of each text that are predicted."""
LEARNT = 16 * 512
"""Tokens that recipes which read text are given at most."""
ASKED = ("a corpus file", "a draft model", "a smaller model", "several processes (torchrun)")
"""What recipes cannot do without."""
LIMIT = 1800
"""Seconds of a cell."""


def documents(path: Path, model: gw.Model, most: int) -> list[list[int]]:
    """Token ids of a file's first texts, `most` in all: one text, or a .jsonl of ``text``."""
    whole = path.read_text(encoding="utf-8")
    texts = [whole]
    if path.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in whole.splitlines()]
    found: list[list[int]] = []
    for text in texts:
        left = most - sum(map(len, found))
        if left <= 0:
            break
        found.append(model.tokenizer.encode(text).ids[:left])
    return found


def prompts_of(path: Path, model: gw.Model, name: str, count: int) -> list[torch.Tensor]:
    """The first prompts of a file, i64[1,S] each."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    ids = [row.get(name) or model.tokenizer.encode(row["text"]).ids for row in rows]
    return [torch.tensor([each]) for each in ids]


def lacking(recipe: Recipe, args: argparse.Namespace) -> str:
    """What a recipe needs that nobody gave; "" if nothing."""
    if recipe.reads_text and args.calibration is None:
        return "needs calibration text"
    given = {"a corpus file"} if args.corpus is not None else set()
    wanted = [what for what in recipe.brought if what in ASKED and what not in given]
    return f"needs {wanted[0]}" if wanted else ""


def write(model: gw.Model, prompts: list[torch.Tensor], tokens: int) -> tuple[list[Any], float]:
    """What a model writes behind each prompt, and its tokens a second."""
    said, seconds, count = [], 0.0, 0
    asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    for prompt in prompts:
        model.forget()
        found = model.generate(prompt, return_dict_in_generate=True, **asked)
        said.append(found)
        seconds += found.stats.decode_seconds
        count += found.stats.decoded_tokens
    return said, count / seconds if seconds else 0.0


def cell(path: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A recipe's figures on a model."""
    torch.set_num_threads(args.threads)
    target = Target.parse(args.target, threads=args.threads)
    recipe = Recipe.load(name)
    row: dict[str, Any] = {"model": path.name, "recipe": name, "contract": recipe.contract}
    if why := lacking(recipe, args):
        return row | {"none": why}
    plain = gw.optimize(path, "baseline", target=target)
    if "a corpus file" in recipe.brought:
        recipe = recipe.with_options([f"draft_corpus.path={args.corpus}"])
    data = documents(args.calibration, plain, LEARNT) if recipe.reads_text else None
    start = time.perf_counter()
    try:
        made = gw.optimize(path, recipe, target=target, data=data)
    except gw.GraftworkError as error:
        return row | {"none": f"refused: {error}"}
    row["made"] = time.perf_counter() - start
    assert made.report is not None and plain.report is not None
    bytes_ = [model.report.weight_bytes_after for model in (made, plain)]  # type: ignore[union-attr]
    row["weights"] = bytes_[0] / bytes_[1]
    prompts = prompts_of(args.prompts, plain, path.stem, args.count)
    rates: list[tuple[float, float]] = []
    for place in range(args.rounds + 1):
        (own, fast), (other, slow) = (write(m, prompts, args.tokens) for m in (made, plain))
        if place:  # the first round compiles
            rates.append((fast, slow))
    texts = [
        [f.sequences[0, p.shape[1] :].tolist() for f, p in zip(found, prompts, strict=True)]
        for found in (other, own)
    ]
    kept = OwnText.of(zip(*texts, strict=True))
    row |= {"texts": kept.texts, "same": kept.equal, "kept": kept.share}
    steps = [found.stats.accepted_per_step for found in own]
    row["accepted"] = statistics.mean(steps)
    row["speed"] = statistics.median(fast / slow for fast, slow in rates)
    row["caches"] = made.cache_bytes() / max(plain.cache_bytes(), 1)
    for said in args.text:
        label, _, file = said.partition("=")
        cost = cost_of(made, plain, documents(Path(file), plain, TOKENS))
        row[label] = cost.model_dump(exclude={"text"})
    return row


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def markdown(rows: list[dict[str, Any]], labels: list[str]) -> str:
    """A table a model."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        head = [
            "recipe",
            "contract",
            "made",
            "weights",
            "caches",
            "texts the same",
            "tokens a step",
        ]
        head += ["speed", *(f"{label}: KL, ratio, top-1" for label in labels)]
        lines = [f"### {model}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in (r for r in rows if r["model"] == model):
            if "none" in row:
                lines.append(f"| `{row['recipe']}` | {row['contract']} | {row['none'][:200]} |")
                continue
            costs = [row.get(label) for label in labels]
            shown = [
                f"{c['divergence']:.4f}, {c['ratio']:.3f}, {c['agreement']:.1%}" if c else ""
                for c in costs
            ]
            cells = [
                *(f"`{row['recipe']}`", row["contract"], f"{row['made']:.0f} s"),
                *(f"{row['weights']:.2f}", f"{row['caches']:.2f}"),
                *(f"{row['same']}/{row['texts']} ({row['kept']:.0%})", f"{row['accepted']:.2f}"),
                *(f"{row['speed']:.2f}", *shown),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict[str, Any]], labels: list[str], path: Path) -> None:
    """A panel a model: speed over plain, and what it costs the first text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(8 * len(names), 9), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for row in rows:
            cost = row.get(labels[0])
            if row["model"] != name or "none" in row or not cost:
                continue
            exact = row["contract"] != "approximate"
            spot = (row["speed"], max(cost["divergence"], 1e-5))
            axis.scatter(*spot, color="tab:green" if exact else "tab:orange", s=14)
            axis.annotate(
                row["recipe"], spot, fontsize=6, xytext=(2, 2), textcoords="offset points"
            )
        axis.axvline(1, color="grey", linewidth=0.6)
        axis.set(title=name, xlabel="speed over plain decoding", ylabel=f"KL on {labels[0]}, nats")
        axis.set(xscale="log", yscale="log")
        axis.grid(visible=True, linewidth=0.3)
    figure.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--recipes", default=",".join(recipe.name for recipe in recipes()))
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--cell", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(json.dumps(rounded(cell(args.models[0], args.recipes, args))))
        return
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    known = {(row["model"], row["recipe"]) for row in rows}
    for path in args.models:
        for name in args.recipes.split(","):
            if (path.name, name) in known:
                continue
            given = sys.argv[1:]
            own = [a for a in given if a not in map(str, args.models)]
            command = [sys.executable, __file__, str(path), *own, "--recipes", name, "--cell"]
            start = time.perf_counter()
            try:
                ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
                told = ran.stdout.strip().rpartition("\n")[2]
                row = json.loads(told) if ran.returncode == 0 else {}
                why = ran.stderr.strip().rpartition("\n")[2]
            except subprocess.TimeoutExpired:
                row, why = {}, f"not done after {LIMIT} seconds"
            row = row or {
                **{"model": path.name, "recipe": name, "contract": Recipe.load(name).contract},
                "none": f"failed: {why}",
            }
            rows.append(row | {"seconds": round(time.perf_counter() - start)})
            print(json.dumps(rows[-1]), flush=True)
            args.json.write_text(json.dumps(rows, indent=1))
    labels = [said.partition("=")[0] for said in args.text]
    if args.markdown:
        args.markdown.write_text(markdown(rows, labels))
    if args.svg and labels:
        draw(rows, labels, args.svg)


if __name__ == "__main__":
    main()
