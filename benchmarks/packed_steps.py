"""What `pack_tokens` saves: a drafting recipe with and without it, in turns, on ragged batches.

    python benchmarks/packed_steps.py MODEL --prompts FILE.jsonl [--recipes copyspec,bass]
        [--bits int8] [--batch 4] [--tokens 128] [--rounds 5] [--threads 2] [--whole]
        [--set bass.draft_model.model=MODEL]

A line a recipe: tokens that a step of the target feeds (packed), and columns that it has (padded);
milliseconds of a step; new tokens a second over those without packing, the median over the rounds;
and how many texts differ. Only decoding steps count. With --whole drafts are verified whole, at
every step; without, by measured time, so that both may draft differently.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from systems import (
    BITS,
    Result,
    System,
    add_arguments,
    optimized_model,
    over,
    padded,
    read_prompts,
    steady,
    take_turns,
)

import graftwork as gw
from graftwork.recipe import Use
from graftwork.runtime.feeding.step_inputs import StepInputs

PACK = "pack_tokens"


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Tokens and columns of the steps that are fed meanwhile, prompts left out."""
    found, fill = {"tokens": 0, "columns": 0, "steps": 0}, StepInputs.fill

    def noted(self: StepInputs, rows: Any, past: Any, **how: Any) -> None:
        if not how.get("for_good"):
            found["tokens"] += sum(map(len, rows))
            found["columns"] += self.batch * self.width
            found["steps"] += 1
        fill(self, rows, past, **how)

    StepInputs.fill = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StepInputs.fill = fill  # type: ignore[method-assign]


def running(model: gw.Model) -> System:
    """A model as what continues prompts, with what its steps were fed."""

    def run(prompts: Any, count: int) -> Result:
        ids, mask = padded(prompts)
        model.forget(learnt=False)
        with counted() as found:
            result = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                eos_token_id=[],
                pad_token_id=0,
                return_dict_in_generate=True,
            )
        stats = result.stats
        figures = {name: float(value) for name, value in found.items()}
        figures |= {"seconds": stats.executable_seconds, "all_steps": float(stats.steps)}
        new = result.sequences[:, ids.shape[1] :].tolist()
        return new, stats.decode_seconds, figures

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser, "onnxruntime:cpu:float32")
    parser.add_argument("--bits", choices=BITS, default="int8")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    for name in args.recipes.split(","):
        recipe = over(name, args.bits, args.set)
        plain = replace(recipe, passes=tuple(u for u in recipe.passes if u.name != PACK))
        packing = replace(plain, passes=(*plain.passes, Use(PACK)))
        models = {
            key: optimized_model(args.model, made, args.targets, args.threads)
            for key, made in (("padded", plain), ("packed", packing))
        }
        if args.whole:
            models = {key: steady(model) for key, model in models.items()}
        vocab = models["padded"].program.info.vocab_size
        prompts = read_prompts(args.prompts, args.count, args.length, vocab, args.model.name)
        batches = [prompts[n : n + args.batch] for n in range(0, len(prompts), args.batch)]
        systems = {key: running(model) for key, model in models.items()}
        runs = take_turns(systems, batches, args.tokens, args.rounds)
        row: dict[str, Any] = {"recipe": recipe.name, "whole": args.whole, "batch": args.batch}
        for key, run in runs.items():
            total = {figure: sum(values) for figure, values in run.figures.items()}
            row[key] = {
                "tokens_per_step": round(total["tokens"] / max(total["steps"], 1), 2),
                "columns_per_step": round(total["columns"] / max(total["steps"], 1), 2),
                "step_ms": round(1e3 * total["seconds"] / total["all_steps"], 2),
                "tokens_per_s": round(run.rate, 1),
            }
        row["speed"] = round(runs["packed"].over(runs["padded"]), 3)
        pairs = zip(runs["packed"].texts, runs["padded"].texts, strict=True)
        row["differ"] = sum(a != b for a, b in pairs)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
