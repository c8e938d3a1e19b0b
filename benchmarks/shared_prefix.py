"""What a beginning that a batch shares costs, held once and held by each text.

    python benchmarks/shared_prefix.py MODEL [--prefix 1024] [--own 16] [--batches 4,16]
        [--tokens 32] [--recipes baseline,hydragen] [--targets onnxruntime:cpu:float32,...]
        [--rounds 3] [--json F]

Prompts begin with the same `prefix` random tokens and end with `own` others. Recipes take turns, in
another order each round, on the same prompts; every round all is forgotten. Reported by target and
batch: medians of milliseconds a decode step and of prefill seconds, bytes of the state buffers at
the end, and in how many of the texts all tokens are those of the first recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from systems import optimized_model, settle

import graftwork as gw


def ask(model: gw.Model, prompts: torch.Tensor, count: int) -> Any:
    """All prompts at once, from nothing."""
    model.forget()
    settle()
    return model.generate(
        prompts,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
        return_dict_in_generate=True,
    )


def compared(models: dict[str, gw.Model], prompts: torch.Tensor, args: Any) -> dict[str, Any]:
    """By recipe, its figures on some prompts."""
    steps: dict[str, list[float]] = {name: [] for name in models}
    prefills: dict[str, list[float]] = {name: [] for name in models}
    texts: dict[str, list[list[int]]] = {}
    sizes, draw, order = {}, random.Random(0), list(models)
    for turn in range(args.rounds + 1):
        for name in draw.sample(order, len(order)):
            found = ask(models[name], prompts, args.tokens)
            texts[name], sizes[name] = found.sequences.tolist(), models[name].cache_bytes()
            if turn:
                steps[name].append(1e3 * found.stats.decode_seconds / found.stats.steps)
                prefills[name].append(found.stats.prefill_seconds)
    first = texts[order[0]]
    return {
        name: {
            "step_ms": round(statistics.median(steps[name]), 2),
            "prefill_seconds": round(statistics.median(prefills[name]), 3),
            "state_megabytes": round(sizes[name] / 1e6, 1),
            "same_texts": sum(a == b for a, b in zip(texts[name], first, strict=True)),
        }
        for name in order
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--own", type=int, default=16)
    parser.add_argument("--batches", default="4,16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--recipes", default="baseline,hydragen")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    made, report = torch.Generator().manual_seed(0), []
    for target in args.targets.split(","):
        models = {
            name: optimized_model(args.model, name, target, args.threads)
            for name in args.recipes.split(",")
        }
        vocabulary = next(iter(models.values())).program.info.vocab_size
        begun = torch.randint(1, vocabulary, (1, args.prefix), generator=made)
        for batch in map(int, args.batches.split(",")):
            own = torch.randint(1, vocabulary, (batch, args.own), generator=made)
            prompts = torch.cat([begun.expand(batch, -1), own], 1)
            for name, found in compared(models, prompts, args).items():
                row = {"target": target, "prefix": args.prefix, "batch": batch, "recipe": name}
                report.append(row | found)
                print(json.dumps(report[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
