"""How long a prompt takes: milliseconds up to the first new token, batch 1, systems in turns.

    python benchmarks/prefill.py MODEL [--length 512] [--recipes baseline,int8]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--rounds 7]

Ratios compare rates of the same round with the first system's, and are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
from systems import optimized_model, read_prompts, settle

WARM_UP = 3
"""Prompts before those that are timed: the first compiles."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--recipes", default="baseline")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--length", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    ids = torch.tensor(read_prompts(None, 1, args.length, vocab))
    models = {
        f"{recipe} {target}": optimized_model(args.model, recipe, target, args.threads)
        for recipe in args.recipes.split(",")
        for target in args.targets.split(",")
    }
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(WARM_UP + args.rounds):
        for name, model in models.items():
            settle()
            model.forget()
            result = model.generate(
                ids,
                max_new_tokens=1,
                do_sample=False,
                eos_token_id=[],
                pad_token_id=0,
                return_dict_in_generate=True,
            )
            if turn >= WARM_UP:
                seconds[name].append(result.stats.prefill_seconds)
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        row = {
            "median_ms": round(1e3 * statistics.median(times), 1),
            "fastest_ms": round(1e3 * min(times), 1),
            "over_first": round(
                statistics.median(a / b for a, b in zip(first, times, strict=True)), 3
            ),
        }
        print(f"{name:<36} {json.dumps(row)}")


if __name__ == "__main__":
    main()
