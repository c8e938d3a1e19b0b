"""Drafters that learn from use: tokens a step along a stream of texts, and of one that does not.

    python benchmarks/online.py MODEL --recipe eagle --set draft_eagle.weights=HEADS
        --text TEXTS.jsonl [--count 96] [--prompt 64] [--tokens 96] [--every 16] [--rate 3e-4]
        [--target onnxruntime:cpu:float32] [--threads 2] --out FOLDER [--json F]

MODEL is a checkpoint folder or a .gguf file; prompts are drawn from all over the documents of
TEXTS, which are read for nothing else. Drafts are whole, whether they pay or not. Each row, a
stretch of texts between two updates:

    texts       from the stream's beginning
    frozen      tokens a step of the drafter as it was
    learning    of the one that learned from the texts before
    taught      share of what was read then that no draft had
    seconds     of the update behind these texts
    same        texts that are the frozen drafter's: all, as both are the target's
"""

from __future__ import annotations

import argparse
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from real import documents

import graftwork as gw
from graftwork.backends import Target
from graftwork.recipe import Recipe

SPACE = 512
"""Tokens from one prompt's place in a document to the next one's."""


def whole(model: gw.Model) -> gw.Model:
    """The model with drafts that are whole at every step."""
    plan = model.program.plan
    return model.replanned(replace(plan, length=plan.length.steady))


def stretch(
    models: tuple[gw.Model | gw.Learner, ...], prompts: list[list[int]], tokens: int
) -> tuple[list[float], int]:
    """Tokens a step of each over some prompts, and how many texts are the same."""
    steps, made, same = [0] * len(models), 0, 0
    for prompt in prompts:
        texts = []
        for index, model in enumerate(models):
            found: Any = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=tokens,
                eos_token_id=[],
                pad_token_id=0,
                do_sample=False,
                return_dict_in_generate=True,
            )
            steps[index] += found.stats.sequence_steps
            texts.append(found.sequences)
        made += found.stats.decoded_tokens
        same += all(torch.equal(text, texts[0]) for text in texts)
    return [made / count for count in steps], same


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", default="eagle")
    parser.add_argument("--set", action="append", default=[], metavar="PASS.OPTION=VALUE")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--count", type=int, default=96, help="texts")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new ones")
    parser.add_argument("--every", type=int, default=16, help="texts between two updates")
    parser.add_argument("--passes", type=int, default=2, help="uses of a text")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = Target.parse(args.target, threads=args.threads)
    recipe = Recipe.load(args.recipe).with_options(args.set)
    frozen = whole(gw.optimize(args.model, recipe, target=target))
    options = {"every": args.every, "passes": args.passes, "rate": args.rate}
    learner = gw.Learner(frozen, args.out, **options)
    read = documents(args.text, frozen, 2**31)
    places = [ids[at:] for ids in read for at in range(0, len(ids) - args.prompt, SPACE)]
    random.Random(0).shuffle(places)
    prompts = [ids[: args.prompt] for ids in places[: args.count]]
    rows = []
    for first in range(0, len(prompts), args.every):
        some = prompts[first : first + args.every]
        (before, now), same = stretch((frozen, learner), some, args.tokens)
        row: dict[str, Any] = {"texts": first + len(some), "frozen": round(before, 3)}
        row |= {"learning": round(now, 3), "same": same, "of": len(some)}
        if len(learner.updates) > len(rows):
            update = learner.updates[-1]
            row |= {"taught": round(update.taught, 3), "seconds": round(update.seconds, 1)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
