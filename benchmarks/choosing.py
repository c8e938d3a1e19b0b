"""What `auto` takes for each kind of text, and what it might have taken.

    python benchmarks/choosing.py MODEL --prompts FILE.jsonl
        [--target onnxruntime:cpu:float32] [--minutes 5] [--tokens 96] [--rounds 3]
        --json F [--markdown F]

MODEL is a checkpoint folder or a .gguf file. A line of FILE has ``kind`` and ``text``, or token ids
under the name of the model's folder or file. For each line `graftwork.optimize(MODEL, "auto",
data=...)` is given the prompt with what the model in int8 writes behind it, and chooses. Then the
prompt is continued by what it took and by all that it might have taken over these weights, in
turns, medians of rounds; a kind whose row stands in `json` is not measured again. Each row:

    took      the recipe
    speed     its tokens a second over the same weights' without drafts
    share     over the fastest's; 1: it is the fastest
    others    speeds of the others over the weights' alone, by recipe
    itself    the weights alone, timed last in each round, over the same timed first: how far 1.00
              is to be believed
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from real import prompts_of, rounded, write
from systems import over

import graftwork as gw
from graftwork.backends import Target
from graftwork.choosing import AUTO, DRAFTS


def chosen(prompt: torch.Tensor, writer: gw.Model, args: argparse.Namespace) -> Any:
    """The model that `auto` makes for texts like this one."""
    text = write(writer, prompt, args.context).sequences
    return gw.optimize(args.model, AUTO, data=text, minutes=args.minutes, target=args.to)


def row_of(prompt: torch.Tensor, writer: gw.Model, args: argparse.Namespace) -> dict[str, Any]:
    """See the module."""
    took = chosen(prompt, writer, args).report.recipe
    name, _, bits = took.rpartition("+")
    if not name:
        name, bits = ("baseline", took) if took in args.bits else (took, "float32")
    recipes = ["baseline", *DRAFTS, "baseline"]
    makes = {each: over(each, bits, []) for each in dict.fromkeys(recipes)}
    models = {each: gw.optimize(args.model, made, target=args.to) for each, made in makes.items()}
    for model in models.values():  # steps are compiled
        write(model, prompt, args.tokens)
    rates: dict[str, list[float]] = {each: [] for each in models}
    itself = []
    for _ in range(args.rounds):
        found = [write(models[e], prompt, args.tokens).stats.tokens_per_second for e in recipes]
        alone = (found[0] + found[-1]) / 2
        itself.append(found[-1] / found[0])
        for each, rate in zip(recipes[:-1], found[:-1], strict=True):
            rates[each].append(1.0 if each == "baseline" else rate / alone)
    speeds = {each: statistics.median(some) for each, some in rates.items()}
    own = speeds[name]
    return {
        "took": took,
        "speed": own,
        "share": own / max(speeds.values()),
        "others": speeds,
        "itself": statistics.median(itself),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """A line a kind of text."""
    lines = ["| text | took | speed | of the fastest | " + " | ".join(DRAFTS) + " | noise |"]
    lines.append("|" + "---|" * (len(DRAFTS) + 5))
    for row in rows:
        others = " | ".join(f"{row['others'][name]:.2f}" for name in DRAFTS)
        cells = f"`{row['took']}` | {row['speed']:.2f} | {row['share']:.2f} | {others}"
        lines.append(f"| {row['kind']} | {cells} | {abs(row['itself'] - 1):.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each choice")
    parser.add_argument("--context", type=int, default=256, help="tokens of a text behind a prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.to, args.bits = Target.parse(args.target, threads=args.threads), ("int8", "int4")
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    kinds = [json.loads(line).get("kind", str(index)) for index, line in enumerate(lines)]
    writer = gw.optimize(args.model, "int8", target=args.to)
    prompts = prompts_of(args.prompts, writer, args.model.stem, args.count)
    known = {row["kind"] for row in rows}
    for kind, prompt in zip(kinds, prompts, strict=True):
        if kind not in known:
            found = {"model": args.model.name, "kind": kind} | row_of(prompt, writer, args)
            rows.append(rounded(found))
            args.json.write_text(json.dumps(rows, indent=1) + "\n")
            print(markdown(rows[-1:]), flush=True)
    if args.markdown:
        args.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
