"""What a turn of a conversation costs where the earlier ones are held, and where they are not.

    python benchmarks/conversation.py MODEL [--recipe baseline] [--turns 10] [--length 1500]
        [--reply 32] [--target onnxruntime:cpu:float32] [--rounds 5] [--json F]

A conversation of random tokens grows by as many a turn as make `length` at the last, replies
included. The last turn is asked again and again, in turns: with what the turn before left in the
caches, and after `forget`. Its new tokens are also asked as a text of their own: what is held
cannot bring the turn below the time of that. Reported are prefill's seconds, by the clock (medians)
and of the processor in calls (the fastest), tokens fed, and whether the turn gave the same tokens
both times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
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


def timed(model: gw.Model, text: list[int]) -> tuple[float, float, int]:
    """Seconds of a prompt by the clock and of the processor, and how much of it was fed."""
    begun = time.process_time()
    stats = ask(model, text, 1).stats
    taken = time.process_time() - begun
    return stats.prefill_seconds, taken, len(text) - stats.reused_tokens


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
    whole, taken = text + asked[-1], dict[str, list[Any]]()
    for _ in range(args.rounds + 1):
        for name, prompt, before in (
            ("held", whole, [*text, 1]),  # what the turn before left
            ("fed again", whole, None),
            ("new tokens alone", asked[-1], None),
        ):
            model.forget()
            if before:
                ask(model, before, 1)
            taken.setdefault(name, []).append(timed(model, prompt))
    replies = []
    for before in ([*text, 1], None):
        model.forget()
        if before:
            ask(model, before, 1)
        replies.append(ask(model, whole, args.reply).sequences)
    same = torch.equal(*replies)
    walls = {n: statistics.median(wall for wall, _, _ in t[1:]) for n, t in taken.items()}
    cpu = {n: min(own for _, own, _ in t[1:]) for n, t in taken.items()}
    report: dict[str, Any] = {
        "model": args.model.name,
        "recipe": args.recipe,
        "target": args.target,
        "prompt": len(whole),
        "fed": {n: t[-1][2] for n, t in taken.items()},
        "prefill_seconds": walls,
        "processor_seconds": cpu,
        "ratio": {n: x["fed again"] / x["held"] for n, x in (("clock", walls), ("processor", cpu))},
        "same_tokens": same,
    }
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
