"""What a turn of a conversation costs where the earlier ones are held, and where they are not.

    python benchmarks/conversation.py MODEL [--recipe baseline] [--turns 10] [--length 1500]
        [--reply 32] [--target onnxruntime:cpu:float32] [--rounds 5] [--json F]

A conversation of random tokens grows by as many a turn as make `length` at the last, replies
included. The last turn is asked again and again, in turns: with what the turn before left in the
caches, and after `forget`. Reported are the medians of its prefill seconds, tokens fed, and whether
both gave the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from systems import optimized_model, read_prompts, settle

import graftwork as gw


def ask(model: gw.Model, text: list[int], reply: int) -> Any:
    """One turn."""
    settle()
    return model.generate(
        torch.tensor([text]),
        max_new_tokens=reply,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
        return_dict_in_generate=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--recipe", default="baseline")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--length", type=int, default=1500)
    parser.add_argument("--reply", type=int, default=32)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = optimized_model(args.model, args.recipe, args.target, args.threads)
    more = args.length // args.turns - args.reply
    if more < 1:
        parser.error(f"{args.turns} turns of {args.reply} tokens do not fit into {args.length}")
    asked = read_prompts(None, args.turns, more, model.program.info.vocab_size)
    text: list[int] = []
    for turn in asked[:-1]:
        text = ask(model, text + turn, args.reply).sequences[0].tolist()
    seconds: dict[str, list[float]] = {"held": [], "fed again": []}
    fed, same = {}, True
    for _ in range(args.rounds + 1):
        model.forget()
        ask(model, [*text, 1], 1)  # what the turn before left
        held = ask(model, text + asked[-1], args.reply)
        model.forget()
        anew = ask(model, text + asked[-1], args.reply)
        same = same and torch.equal(held.sequences, anew.sequences)
        for name, result in zip(seconds, (held, anew), strict=True):
            seconds[name].append(result.stats.prefill_seconds)
            fed[name] = len(text + asked[-1]) - result.stats.reused_tokens
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    report = {"model": args.model.name, "recipe": args.recipe, "target": args.target}
    report |= {"prompt": len(text + asked[-1]), "fed": fed, "prefill_seconds": medians}
    report |= {"ratio": medians["fed again"] / medians["held"], "same_tokens": same}
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
