"""Threads that share models: every call gives the tokens that it gives alone, or a stated error.

    python tests/fuzz/threads.py --calls 500
    python tests/fuzz/threads.py --calls 500 --threads 4 8 16 --targets eager torch onnxruntime

A thread makes `--calls` calls, of all kinds in an order of its own: greedy, sampled and batched
ones, ones whose streamer generates with the same model (a stated error) and ones whose streamer
breaks off. Nothing is compiled when the threads start: that, too, happens under them. Each recipe
runs by itself and then all at once, a model each. Exit status 1 if a call gave something else.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import graftwork as gw
from graftwork.ir import InputError

MODEL = Path(gw.__file__).with_name("demo_model")
RECIPES = ("baseline", "copyspec", "copyspec_recycling")
REMEMBERS = ("copyspec_recycling", "recycling")
"""Recipes that draft from what earlier calls left, on which depends what a seed draws."""

NEW = 8
"""Tokens a call generates."""


class BrokenOff(Exception):
    """A streamer's own error."""


class Streamer:
    """Does something when the first new token comes."""

    def __init__(self, does: Callable[[], None]) -> None:
        self.does, self.put_before = does, 0

    def put(self, value: torch.Tensor) -> None:
        self.put_before += 1
        if self.put_before == 2:
            self.does()

    def end(self) -> None:
        pass


def requests(vocabulary: int, samples: bool) -> list[dict[str, Any]]:
    """Calls of several shapes, as keywords of `generate`; with or without a sampled one."""
    rng = random.Random(7)
    prompts = [[rng.randrange(vocabulary) for _ in range(size)] for size in (1, 3, 9, 20)]
    # Texts that repeat themselves are drafted for.
    prompts += [(prompt * 6)[:40] for prompt in prompts[1:3]]
    greedy = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    found: list[dict[str, Any]] = [{"input_ids": [prompt], **greedy} for prompt in prompts]
    if samples:
        sampled = {**greedy, "do_sample": True, "temperature": 0.9, "seed": 3}
        found.append({"input_ids": [prompts[2]], **sampled})
    rows = torch.tensor([[0] * (9 - len(prompt)) + prompt for prompt in prompts[:3]])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts[:3]])
    found.append({"input_ids": rows, "attention_mask": mask, "pad_token_id": 0, **greedy})
    return found


def one_call(model: gw.Model, request: Mapping[str, Any], wanted: Any, kind: str) -> str:
    """What became of a call: right, stated or broken off are what may be."""

    def again() -> None:
        model.generate(**request)

    def break_off() -> None:
        raise BrokenOff

    does = {"nested": again, "broken": break_off}.get(kind)
    streamer = {} if does is None else {"streamer": Streamer(does)}
    try:
        ids = model.generate(**request, **streamer)
    except BrokenOff:
        return "broken off" if kind == "broken" else "wrong error"
    except InputError as error:
        return "stated" if kind == "nested" and "streamer" in str(error) else "wrong error"
    except Exception as error:
        print(f"{kind}: {type(error).__name__}: {error}", file=sys.stderr)
        return "wrong error"
    if kind != "plain":
        return "no error"
    return "right" if ids.tolist() == wanted else "wrong tokens"


def hammer(
    make: Callable[[str], gw.Model], recipes: Sequence[str], threads: int, calls: int, seed: int = 0
) -> Counter[str]:
    """How often calls of `threads` threads ended how. make: the model of a recipe."""
    shared, alone = ([make(recipe) for recipe in recipes] for _ in range(2))
    size = shared[0].program.info.vocab_size
    asked = [requests(size, samples=recipe not in REMEMBERS) for recipe in recipes]
    wanted = [
        [model.generate(**request).tolist() for request in every]
        for model, every in zip(alone, asked, strict=True)
    ]
    found: list[Counter[str]] = [Counter() for _ in range(threads)]
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        start.wait()
        for _ in range(calls):
            which = rng.randrange(len(shared))
            request = rng.randrange(len(asked[which]))
            kind = rng.choices(("plain", "nested", "broken"), (8, 1, 1))[0]
            ended = one_call(shared[which], asked[which][request], wanted[which][request], kind)
            found[number][ended] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(found, Counter())


FINE = frozenset({"right", "stated", "broken off"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(MODEL), help="a checkpoint folder")
    parser.add_argument("--calls", type=int, default=500, help="of each thread")
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--targets", nargs="+", default=["eager", "torch", "onnxruntime"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    args = parser.parse_args()
    bad = 0
    for target in args.targets:
        for recipes in [*([recipe] for recipe in args.recipes), args.recipes]:
            for threads in args.threads:
                begun = time.perf_counter()
                where = gw.Target.parse(f"{target}:cpu:float32", threads=1)
                ended = hammer(
                    lambda recipe, t=where: gw.optimize(args.model, recipe, target=t),
                    recipes,
                    threads,
                    args.calls,
                )
                seconds = time.perf_counter() - begun
                counts = ", ".join(f"{count} {what}" for what, count in sorted(ended.items()))
                print(f"{target} {'+'.join(recipes)} {threads} threads: {counts}; {seconds:.0f} s")
                sys.stdout.flush()
                bad += sum(count for what, count in ended.items() if what not in FINE)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
