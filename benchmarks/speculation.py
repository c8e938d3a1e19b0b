"""What speculative recipes gain: tokens a step, speed next to plain decoding, and the same text.

    python benchmarks/speculation.py MODEL --prompts FILE.jsonl --recipes copyspec,recycling
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--count 24] [--tokens 128]
        [--batch 1] [--rounds 1] [--set medusa.draft_medusa.weights=FOLDER] [--json FILE.jsonl]

MODEL is a checkpoint folder; prompts are lines with a field ``ids``. One run, in turns (see
`systems`): each recipe on each target, plain decoding (the recipe baseline) on the same targets,
transformers eager in float32 and, with one prompt at a time, transformers' own prompt lookup.

same: texts equal to transformers' greedy ones in float32, one prompt at a time and without drafts.
tokens/step: of the first round, because some drafters remember what they have met; the token that
the target adds itself counts. vs plain: rate next to plain decoding on the same target; a recipe
that is slower is marked. A lossless recipe on a float32 target ought to have all texts the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from systems import (
    System,
    add_arguments,
    optimized,
    read_prompts,
    take_turns,
    transformers_eager,
    with_settings,
)

from graftwork.recipe import Recipe

EAGER, LOOKUP, PLAIN = "transformers eager", "transformers prompt lookup", "baseline"
WHERE = "transformers:cpu:float32"

Key = tuple[str, str]
"""Name of a system, and where it runs."""


def contestants(args: argparse.Namespace) -> dict[Key, System]:
    """Everything that is measured, in the order of the table."""
    found = {(EAGER, WHERE): transformers_eager(args.model)}
    if args.batch == 1:
        found[LOOKUP, WHERE] = transformers_eager(
            args.model, prompt_lookup_num_tokens=args.lookup_tokens
        )
    names = dict.fromkeys((PLAIN, *filter(None, args.recipes.split(","))))
    for target in args.targets.split(","):
        for name in names:
            recipe = with_settings(name, args.set)
            found[name, target] = optimized(args.model, recipe, target, args.threads)
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of figures for each system."""
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab)
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    systems = contestants(args)
    named = {" on ".join(key): key for key in systems}
    runs = take_turns(
        {name: systems[key] for name, key in named.items()}, batches, args.tokens, args.rounds
    )
    kept = {key: runs[name] for name, key in named.items()}
    eager, lookup = kept[EAGER, WHERE], kept.get((LOOKUP, WHERE))
    wanted = eager.texts
    if args.batch > 1:
        # Padding changes the last bits of what transformers computes.
        wanted = [systems[EAGER, WHERE]([prompt], args.tokens)[0][0] for prompt in prompts]
    rows = []
    for (name, target), run in kept.items():
        plain = kept.get((PLAIN, target))
        accepted = run.figures.get("accepted_per_step", [])[: len(batches)]
        sizes = [len(batch) for batch in batches]
        rows.append(
            {
                "recipe": name,
                "target": target,
                "contract": "" if target == WHERE else Recipe.load(name).contract,
                "batch": args.batch,
                "prompts": len(prompts),
                "new_tokens": args.tokens,
                "rounds": args.rounds,
                "same": sum(a == b for a, b in zip(wanted, run.texts, strict=True)),
                # Tokens over steps: every sequence decodes as many tokens.
                "tokens_per_step": statistics.harmonic_mean(accepted, sizes) if accepted else None,
                "tokens_per_second": run.rate,
                "rates": run.rates,
                "vs_plain": run.over(plain) if plain else None,
                "vs_transformers": run.over(eager),
                "vs_prompt_lookup": run.over(lookup) if lookup else None,
                "slower_than_plain": plain is not None and run.over(plain) < 1,
            }
        )
    return rows


def table(rows: Iterable[dict[str, Any]], title: str) -> Table:
    """The rows for the terminal."""
    shown = Table(title=title, box=None, title_justify="left", pad_edge=False)
    for column in ("target", "recipe", "contract"):
        shown.add_column(column, no_wrap=True)
    for column in ("same", "tokens/step", "tokens/s", "vs plain", "vs eager", "vs lookup"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("")
    for row in rows:
        numbers = [row[k] for k in ("tokens_per_step", "tokens_per_second")]
        ratios = [row[k] for k in ("vs_plain", "vs_transformers", "vs_prompt_lookup")]
        shown.add_row(
            row["target"],
            row["recipe"],
            row["contract"],
            f"{row['same']}/{row['prompts']}",
            *("" if number is None else f"{number:.2f}" for number in (*numbers, *ratios)),
            "[bold red]slower than plain[/]" if row["slower_than_plain"] else "",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser, targets="onnxruntime:cpu:float32")
    parser.add_argument("--batch", type=int, default=1, help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lookup-tokens", type=int, default=10, help="of transformers' lookup")
    parser.add_argument("--json", type=Path, help="write a line a row")
    args = parser.parse_args()
    owners = {setting.partition(".")[0] for setting in args.set}
    if strange := sorted(owners - set(args.recipes.split(","))):
        parser.error(f"--set {strange[0]}...: expected one of --recipes before the first dot")
    torch.set_num_threads(args.threads)
    rows = measure(args)
    title = (
        f"{args.model.name}: {rows[0]['prompts']} prompts, {args.tokens} new tokens, batch "
        f"{args.batch}, {args.rounds} round(s), {args.threads} threads"
    )
    console = Console()
    # What is piped somewhere shall not be cut to a terminal's width.
    console.width = max(console.width, 0 if console.is_terminal else 160)
    console.print(table(rows, title))
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
