"""Proof by tokens: do speculative recipes continue prompts exactly as transformers does?

    python benchmarks/lossless.py MODEL --prompts FILE.jsonl --recipes copyspec,recycling
        [--targets eager:cpu:float32,torch:cpu:float32,onnxruntime:cpu:float32] [--batches 1,4]
        [--count 24] [--tokens 128] [--set medusa.draft_medusa.weights=FOLDER] [--json FILE.jsonl]
        [--reference int4] [--data TEXT]

MODEL is a checkpoint folder; prompts are lines with a field ``ids``. transformers' greedy texts,
made in float32 one prompt at a time, are the measure; each recipe runs on each target, alone and in
batches of prompts as they come, so that their lengths and what is accepted differ. tokens/step
counts the token that the target adds itself. With --reference the measure is what that recipe says
on the same target, one prompt at a time: drafts must not change what an approximate model says.
With --data passes that learn from text have some.

With --json each row is written as soon as it is known, and rows that the file holds already are not
run again: a long proof can be interrupted. The exit status is 1 if any text differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from systems import (
    Batch,
    System,
    add_arguments,
    optimized,
    read_prompts,
    transformers_eager,
    with_settings,
)

Row = dict[str, Any]


def known(path: Path | None) -> list[Row]:
    """The rows that a file holds."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(args: argparse.Namespace, target: str, prompts: Batch) -> list[list[int]]:
    """The texts that others are compared with: the reference's on a target, or transformers'."""
    if args.reference:
        recipe = with_settings(args.reference, args.set)
        system = optimized(args.model, recipe, target, args.threads, args.data)
    else:
        system = transformers_eager(args.model)
    return [system([prompt], args.tokens)[0][0] for prompt in prompts]


def prove(
    args: argparse.Namespace,
    system: System,
    wanted: Sequence[list[int]],
    prompts: Batch,
    key: tuple[str, str, int],
) -> Row:
    """One recipe on one target in batches of one size, next to the `wanted` texts."""
    name, target, size = key
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    begun = time.perf_counter()
    texts: list[list[int]] = []
    accepted = []
    for batch in batches:
        new, _, figures = system(batch, args.tokens)
        texts += new
        accepted.append(figures["accepted_per_step"])
    return {
        "recipe": name,
        "target": target,
        "batch": size,
        "prompts": len(prompts),
        "new_tokens": args.tokens,
        "same": sum(a == b for a, b in zip(wanted, texts, strict=True)),
        # Tokens over steps: every sequence decodes as many tokens.
        "tokens_per_step": statistics.harmonic_mean(accepted, list(map(len, batches))),
        "seconds": time.perf_counter() - begun,
    }


def table(rows: Sequence[Row], title: str) -> Table:
    """A line a recipe, a column a target and batch size: equal texts, and tokens a step."""
    places = list(dict.fromkeys((row["target"], row["batch"]) for row in rows))
    shown = Table(title=title, box=None, title_justify="left", pad_edge=False)
    shown.add_column("recipe", no_wrap=True)
    for target, size in places:
        shown.add_column(f"{target}, batch {size}", justify="right")
    for name in dict.fromkeys(row["recipe"] for row in rows):
        cells = {(row["target"], row["batch"]): row for row in rows if row["recipe"] == name}
        shown.add_row(
            name,
            *(
                f"{cell['same']}/{cell['prompts']} ({cell['tokens_per_step']:.2f})"
                if (cell := cells.get(place))
                else ""
                for place in places
            ),
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser, targets="eager:cpu:float32,torch:cpu:float32,onnxruntime:cpu:float32")
    parser.add_argument("--batches", default="1,4", help="numbers of prompts at a time")
    parser.add_argument("--json", type=Path, help="append a line a row; skip those it holds")
    parser.add_argument("--reference", help="the recipe whose texts are the measure")
    parser.add_argument("--data", type=Path, help="text for passes that learn from some")
    args = parser.parse_args()
    for name in args.recipes.split(","):
        approximate = with_settings(name, args.set).contract == "approximate"
        if approximate and not args.reference:
            parser.error(
                f"{name} is approximate: it does not promise transformers' texts; leave it out, or "
                f"name the recipe whose texts it promises (--reference)"
            )
    torch.set_num_threads(args.threads)
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab)
    rows = known(args.json)
    done = {(row["recipe"], row["target"], row["batch"]) for row in rows}
    keys = [
        (name, target, int(size))
        for name in args.recipes.split(",")
        for target in args.targets.split(",")
        for size in args.batches.split(",")
    ]
    wanted: dict[str, list[list[int]]] = {}
    made: tuple[tuple[str, str], System] | None = None
    for key in (key for key in keys if key not in done):
        target = key[1] if args.reference else ""
        if target not in wanted:
            wanted[target] = measure(args, target, prompts)
        if made is None or made[0] != key[:2]:
            made = None  # two programs at a time would take twice the memory
            gc.collect()
            recipe = with_settings(key[0], args.set)
            made = key[:2], optimized(args.model, recipe, key[1], args.threads, args.data)
        row = prove(args, made[1], wanted[target], prompts, key)
        rows.append(row)
        print(
            f"{row['recipe']} on {row['target']}, batch {row['batch']}: {row['same']}/"
            f"{row['prompts']} the same, {row['tokens_per_step']:.2f} tokens/step, "
            f"{row['seconds']:.0f} s",
            file=sys.stderr,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    whose = args.reference or "transformers"
    title = f"{args.model.name}: texts equal to {whose}'s (tokens a step)"
    console = Console()
    # What is piped somewhere shall not be cut to a terminal's width.
    console.width = max(console.width, 0 if console.is_terminal else 160)
    console.print(table(rows, title))
    sys.exit(any(row["same"] < row["prompts"] for row in rows))


if __name__ == "__main__":
    main()
