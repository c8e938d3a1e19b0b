"""Proof by tokens: do processes that hold a part of the weights each say what one process says?

    torchrun --nproc-per-node 2 benchmarks/parts.py MODEL --prompts FILE.jsonl
        --recipes baseline,copyspec,medusa,int8 --targets eager:cpu:float32 [--count 12]
        [--tokens 128] [--exact] [--set medusa.draft_medusa.weights=FOLDER]

Each process continues the prompts whole (every recipe as it is) and as one of all (with
`shard_tensors`), and says how many texts are the same, which bytes of the weights it holds and how
long decoding took. Where processes share a machine's cores, so that nothing is faster, times show
what the exchange costs. The exit status is 1 if a text differs; sums over processes are rounded
otherwise than those of one, so that near ties may.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from systems import add_arguments, optimized_model, padded, read_prompts, with_settings

import graftwork as gw
from graftwork.ir.ops.parallel import started
from graftwork.recipe import Use


def held(model: gw.Model) -> int:
    """Bytes of a program's weights."""
    return sum(weight.type.nbytes for weight in model.program.weights.values())


def texts(model: gw.Model, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], float]:
    """New tokens of each prompt, one at a time, and seconds of decoding."""
    found, seconds = [], 0.0
    for prompt in prompts:
        ids, mask = padded([prompt])
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=tokens,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        found.append(result.sequences[0, ids.shape[1] :].tolist())
        seconds += result.stats.decode_seconds
    return found, seconds


def main() -> int:
    """The command line; 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser, "eager:cpu:float32")
    parser.add_argument("--exact", action="store_true", help="split no sum (shard_tensors.exact)")
    args = parser.parse_args()
    place = started()
    if place is None:
        parser.error("run it with torchrun --nproc-per-node 2")
    prompts = read_prompts(args.prompts, args.count, args.length, 256)
    table = Table(title=f"process {place[0]} of {place[1]}")
    for column in ("recipe", "target", "same texts", "weights", "time"):
        table.add_column(column)
    differs = False
    for name in args.recipes.split(","):
        recipe = with_settings(name, args.set)
        options = {"processes": place[1], "exact": args.exact}
        spread = replace(recipe, passes=(*recipe.passes, Use("shard_tensors", options)))
        for target in args.targets.split(","):
            models = [optimized_model(args.model, r, target, 1) for r in (recipe, spread)]
            (wanted, alone), (found, took) = (texts(m, prompts, args.tokens) for m in models)
            same = sum(a == b for a, b in zip(wanted, found, strict=True))
            differs |= same < len(prompts)
            share = held(models[1]) / held(models[0])
            row = name, target, f"{same}/{len(prompts)}", f"{share:.3f}", f"{took / alone:.2f}"
            table.add_row(*row)
    if place[0] == 0:
        Console().print(table)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
