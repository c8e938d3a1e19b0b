"""Proof by tokens: do speculative recipes continue prompts exactly as transformers does?

    python benchmarks/lossless.py MODEL --prompts FILE.jsonl --recipes copyspec,recycling
        [--targets eager:cpu:float32,torch:cpu:float32,onnxruntime:cpu:float32] [--batches 1,4]
        [--count 24] [--tokens 128] [--set medusa.draft_medusa.weights=FOLDER] [--json FILE.jsonl]
        [--reference int4 | --bits float32,int8,int4] [--data TEXT] [--whole]
        [--draft SMALLER] [--corpus FILE] [--markdown FILE.md]

MODEL is a checkpoint folder; prompts are lines with a field ``ids``. transformers' greedy texts,
made in float32 one prompt at a time, are the measure; each recipe runs on each target, alone and in
batches of prompts as they come, so that their lengths and what is accepted differ. tokens/step
counts the token that the target adds itself. With --reference the measure is what that recipe says
on the same target, one prompt at a time: drafts must not change what an approximate model says.
With --bits each recipe's passes run over weights of each of these, and the measure is plain
decoding over them. ``--recipes lossless`` are all that promise texts of the model. With --data
passes that learn from text have some; --whole drafts at every step, also where that does not pay.
--draft is the model of recipes that draft by a smaller one, --corpus the file of those that copy.
A line of --prompts may have ids under the name of the model's folder.

A recipe that refuses the model, or needs what it was not given, has a row that says so.

With --json each row is written as soon as it is known, and rows that the file holds already are not
run again: a long proof can be interrupted, and the file may hold those of other models, too. With
--markdown all that it holds is written as tables of a page. The exit status is 1 if any text
differs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from systems import (
    BITS,
    Batch,
    System,
    add_arguments,
    optimized_model,
    over,
    read_prompts,
    running,
    steady,
    transformers_eager,
    with_guests,
    with_settings,
)

import graftwork as gw
from graftwork.backends.tiles import kernel_name
from graftwork.ir import GraftworkError
from graftwork.ir.plan.contract import changes
from graftwork.recipe import recipes

Row = dict[str, Any]
Key = tuple[str, str, str, str, int]
KEY = ("model", "recipe", "target", "bits", "batch")
"""What a row is known by."""

ALL = "lossless"
"""Names all recipes of this contract."""


def known(path: Path | None) -> list[Row]:
    """The rows that a file holds."""
    if path is None or not path.exists():
        return []
    return [{"bits": "", **json.loads(line)} for line in path.read_text().splitlines()]


def chosen(names: str) -> list[str]:
    """The recipes that are named, or all lossless ones."""
    if names != ALL:
        return names.split(",")
    return [recipe.name for recipe in recipes() if recipe.contract == ALL]


def built(args: argparse.Namespace, name: str, target: str, bits: str) -> gw.Model:
    """A recipe's model on a target. bits: of weights; "": as the recipe has them."""
    recipe = over(name, bits, args.set) if bits else with_settings(name, args.set)
    recipe = with_guests(recipe, args.corpus, args.draft)
    model = optimized_model(args.model, recipe, target, args.threads, args.data)
    return steady(model) if args.whole else model


def measure(args: argparse.Namespace, target: str, bits: str, prompts: Batch) -> list[list[int]]:
    """The texts that others are compared with: plain decoding's over weights of so many bits, the
    reference's on a target, or transformers'."""
    if bits or args.reference:
        system = running(built(args, args.reference or BITS[bits], target, ""))
    else:
        system = transformers_eager(args.model)
    return [system([prompt], args.tokens)[0][0] for prompt in prompts]


def proved(
    args: argparse.Namespace, wanted: Sequence[list[int]], prompts: Batch, keys: Sequence[Key]
) -> Iterator[Row]:
    """One recipe on one target, in batches of each size, next to the `wanted` texts."""
    system = None
    for key in keys:
        row: Row = {**dict(zip(KEY, key, strict=True)), "prompts": len(prompts)}
        row |= {"new_tokens": args.tokens, "whole": args.whole, "kernels": kernel_name()}
        if own := [one for one in args.set if one.startswith(f"{key[1]}.")]:
            row["set"] = own
        try:
            system = system or running(built(args, *key[1:4]))
        except GraftworkError as error:
            yield row | {"none": str(error)}
            continue
        yield row | compared(system, wanted, prompts, key[-1], args.tokens)


def compared(
    system: System, wanted: Sequence[list[int]], prompts: Batch, size: int, tokens: int
) -> Row:
    """How many texts are the same in batches of `size` prompts, and how they came to be."""
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    begun = time.perf_counter()
    texts: list[list[int]] = []
    accepted = []
    for batch in batches:
        new, _, figures = system(batch, tokens)
        texts += new
        accepted.append(figures["accepted_per_step"])
    return {
        "same": sum(a == b for a, b in zip(wanted, texts, strict=True)),
        # Tokens over steps: every sequence decodes as many tokens.
        "tokens_per_step": statistics.harmonic_mean(accepted, list(map(len, batches))),
        "seconds": time.perf_counter() - begun,
    }


def said(row: Row) -> str:
    """What a row's cell shows."""
    if "none" in row:
        return "refused"
    return f"{row['same']}/{row['prompts']} ({row['tokens_per_step']:.2f})"


def told(row: Row) -> str:
    """A row as a line."""
    place = f"{row['recipe']} on {row['target']}{row['bits'] and ' over ' + row['bits']}"
    if "none" in row:
        return f"{place}: refused: {row['none']}"
    return (
        f"{place}, batch {row['batch']}: {row['same']}/{row['prompts']} the same, "
        f"{row['tokens_per_step']:.2f} tokens/step, {row['seconds']:.0f} s"
    )


def table(rows: Sequence[Row], title: str) -> Table:
    """A line a recipe, a column a target and batch size: equal texts, and tokens a step."""
    of = itemgetter(*KEY[2:])
    places = list(dict.fromkeys(map(of, rows)))
    shown = Table(title=title, box=None, title_justify="left", pad_edge=False)
    shown.add_column("recipe", no_wrap=True)
    for target, bits, size in places:
        shown.add_column(f"{target}{bits and ' ' + bits}, batch {size}", justify="right")
    for name in dict.fromkeys(row["recipe"] for row in rows):
        cells = {of(row): said(row) for row in rows if row["recipe"] == name}
        shown.add_row(name, *(cells.get(place, "") for place in places))
    return shown


def markdown(rows: Sequence[Row]) -> str:
    """A table a model: a line a recipe, a column a target and bits of weights, and in its cells how
    many texts of all batch sizes are the same, and tokens a step. Refusals are named below it."""
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = sorted((row for row in rows if row["model"] == model), key=itemgetter("recipe"))
        places = sorted({(row["target"], row["bits"]) for row in own})
        heads = ["recipe", *(f"{target.split(':')[0]} {bits}".strip() for target, bits in places)]
        lines = [f"## Texts of {model}", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        refused: dict[str, list[str]] = {}
        for name in dict.fromkeys(row["recipe"] for row in own):
            cells = []
            for place in places:
                at = [r for r in own if (r["recipe"], r["target"], r["bits"]) == (name, *place)]
                for reason in {row["none"] for row in at if "none" in row}:
                    named = refused.setdefault(reason, [])
                    named += [f"`{name}`"] * (f"`{name}`" not in named)
                cells.append(texts_of([row for row in at if "none" not in row]))
            if any(cells):
                lines.append(f"| `{name}` | {' | '.join(cells)} |")
        lines += [f"\n{', '.join(names)}: {reason}" for reason, names in refused.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def texts_of(rows: Sequence[Row]) -> str:
    """A cell of the page: equal texts of those of all batch sizes, tokens a step alone."""
    if not rows:
        return ""
    same, texts = (sum(row[name] for row in rows) for name in ("same", "prompts"))
    alone = min(rows, key=itemgetter("batch"))
    return f"{same}/{texts} ({alone['tokens_per_step']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser, targets="eager:cpu:float32,torch:cpu:float32,onnxruntime:cpu:float32")
    parser.add_argument("--batches", default="1,4", help="numbers of prompts at a time")
    parser.add_argument("--json", type=Path, help="append a line a row; skip those it holds")
    parser.add_argument("--markdown", type=Path, help="write what --json holds as tables")
    parser.add_argument("--reference", help="the recipe whose texts are the measure")
    parser.add_argument("--bits", default="", help="of weights, by commas: float32, int8, int4")
    parser.add_argument("--whole", action="store_true", help="draft at every step")
    parser.add_argument("--draft", type=Path, help="a smaller model: a folder or a .gguf file")
    parser.add_argument("--corpus", type=Path, help="texts that are copied from")
    parser.add_argument("--data", type=Path, help="text for passes that learn from some")
    args = parser.parse_args()
    if args.markdown and not args.json:
        parser.error("--markdown writes what --json holds: name that file, too")
    names = chosen(args.recipes)
    for name in names:
        approximate = changes(with_settings(name, args.set).contract)
        if approximate and not args.reference:
            parser.error(
                f"{name} is approximate: it does not promise transformers' texts; leave it out, or "
                f"name the recipe whose texts it promises (--reference)"
            )
    torch.set_num_threads(args.threads)
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab, args.model.name)
    rows = [row for row in known(args.json) if row["model"] == args.model.name]
    done = {tuple(row[name] for name in KEY) for row in rows}
    for bits, target in product(args.bits.split(","), args.targets.split(",")):
        wanted: list[list[int]] = []
        for name in names:
            place = (args.model.name, name, target, bits)
            keys = [(*place, int(size)) for size in args.batches.split(",")]
            keys = [key for key in keys if key not in done]
            if keys and not wanted:
                wanted = measure(args, target, bits, prompts)
            for row in proved(args, wanted, prompts, keys):
                rows.append(row)
                print(told(row), file=sys.stderr)
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            gc.collect()  # two programs at a time would take twice the memory
    if args.markdown:
        args.markdown.write_text(markdown(known(args.json)))
    whose = args.reference or ("plain decoding" if args.bits else "transformers")
    title = f"{args.model.name}: texts equal to {whose}'s (tokens a step)"
    console = Console()
    # What is piped somewhere shall not be cut to a terminal's width.
    console.width = max(console.width, 0 if console.is_terminal else 160)
    console.print(table(rows, title))
    sys.exit(any(row["same"] < row["prompts"] for row in rows if "none" not in row))


if __name__ == "__main__":
    main()
