"""Several short texts out of one row (`superposed`), beside greedy decoding, beams and samples.

    python benchmarks/superposed.py MODEL --texts FILE.jsonl --ngrams FILE.jsonl [--prompts 24]
        [--prompt-tokens 48] [--new 10] [--drafts 3] [--target onnxruntime:cpu:float32]
        [--threads 1] [--rounds 5] [--show 2]

Prompts are cut out of texts, {"text": ...} a line, which n-grams are not counted in. best, mean:
the model's own log probability a token of a prompt's likeliest text, and of all its texts. agrees:
tokens of the text that agrees longest with how the author went on. words: different tokens that
the texts of a prompt have at a place, in the mean. ms: a call, prompt included and none of it
known, the median over rounds of the sum over the prompts, in turns. show: prompts to print.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import torch

import graftwork as gw
from graftwork.backends import Target
from graftwork.ir.execution.executable import Planned
from graftwork.ir.plan import SuperposedStep
from graftwork.recipe import Recipe
from graftwork.runtime import generate

WAYS: dict[str, dict[str, Any]] = {
    "no n-grams, T=1": {"alpha": 0.0, "temperature": 1.0},
    "no n-grams, T=0.06": {"alpha": 0.0},
    "n-grams": {},
    "n-grams, k tokens": {"spread": 1},
    "n-grams, T=0.2, alpha=0.3": {"temperature": 0.2, "alpha": 0.3},
}
"""Settings of the step, by what they are called in the table."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--ngrams", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new", type=int, default=10)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="0: no times")
    parser.add_argument("--show", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_ = [f"superpose.path={args.ngrams}", f"superpose.drafts={args.drafts}"]
    target = replace(Target.parse(args.target), threads=args.threads)
    model = gw.optimize(args.model, Recipe.load("superposed").with_options(set_), target=target)
    cut = cuts(model, args.texts, args.prompts, args.prompt_tokens, args.new)
    ways = asked_of(model, args.drafts)
    common = {"max_new_tokens": args.new, "eos_token_id": [], "return_dict_in_generate": True}
    times: dict[str, list[float]] = {way: [] for way in ways}
    print("| way | best | mean | agrees | words | ms |\n|---|---|---|---|---|---|")
    rows = {way: quality(model, *found, common, cut, args) for way, found in ways.items()}
    for _ in range(args.rounds):
        for way, (executable, asked) in ways.items():
            begun = time.perf_counter()
            for prompt, _ in cut:
                model.forget()
                generate(executable, torch.tensor([prompt]), **asked, **common)
            times[way].append((time.perf_counter() - begun) / len(cut) * 1000)
    for way, row in rows.items():
        spent = f"{statistics.median(times[way]):.0f}" if args.rounds else "-"
        print(f"| {way} | {row} | {spent} |")


def cuts(
    model: gw.Model, path: Path, count: int, size: int, new: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts, and how their authors went on."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    chance, found = random.Random(1), []
    while len(found) < count:
        ids = model.tokenizer.encode(chance.choice(texts)).ids
        if len(ids) > size + new:
            at = chance.randrange(len(ids) - size - new)
            found.append((ids[at : at + size], ids[at + size : at + size + new]))
    return found


def asked_of(model: gw.Model, count: int) -> dict[str, tuple[Any, dict[str, Any]]]:
    """What runs each way, and with which options."""
    whole, plan = model.executable, model.program.plan
    several = {"do_sample": False, "num_return_sequences": count}
    sampled = {**several, "do_sample": True, "top_p": 0.9, "top_k": 0, "temperature": 1.0}
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "greedy, one text": (whole, {"do_sample": False}),
        "beams": (whole, {**several, "num_beams": count}),
        "samples, top_p=0.9": (whole, {**sampled, "seed": 1}),
    }
    assert isinstance(plan.step, SuperposedStep)
    for way, changes in WAYS.items():
        changed = replace(plan, step=replace(plan.step, **changes))
        ways[f"superposed, {way}"] = Planned(whole, changed), several
    return ways


def quality(
    model: gw.Model,
    executable: Any,
    asked: dict[str, Any],
    common: dict[str, Any],
    cut: list[tuple[list[int], list[int]]],
    args: argparse.Namespace,
) -> str:
    """A row of the table."""
    best, mean, agrees, words = 0.0, 0.0, 0, 0.0
    for place, (prompt, truth) in enumerate(cut):
        found = generate(executable, torch.tensor([prompt]), **asked, **common)
        new = found.sequences[:, len(prompt) :]
        logits = model(found.sequences)[:, len(prompt) - 1 : -1].log_softmax(-1)
        each = logits.gather(2, new[:, :, None]).mean((1, 2))
        best, mean = best + float(each.max()), mean + float(each.mean())
        texts = new.tolist()
        agrees += max(sum(takewhile(bool, map(eq, text, truth))) for text in texts)
        words += sum(len(set(column)) for column in zip(*texts, strict=True)) / len(truth)
        if place < args.show:
            print(repr(model.tokenizer.decode(prompt)))
            for text in texts:
                print("   ", repr(model.tokenizer.decode(text)))
    count = len(cut)
    return f"{best / count:.2f} | {mean / count:.2f} | {agrees / count:.2f} | {words / count:.2f}"


if __name__ == "__main__":
    main()
