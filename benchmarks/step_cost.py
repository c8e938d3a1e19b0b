"""What a step costs at each width: milliseconds for T = 1, 2, 4, 8, 16, 32, batch 1.

    python benchmarks/step_cost.py MODEL [--recipes baseline,int8] [--target T]

Recipes take turns, width by width; a cell is the median over the rounds, and the fastest round.
With one thread it is milliseconds of the processor, which other programs hardly change.
`past` are tokens of the text before the step: a cache with a budget holds no more rows than that,
and is full here. Rows hold random numbers, because memory that nobody wrote is read from one page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

import graftwork as gw
from graftwork.backends import Target
from graftwork.ir import SOURCE
from graftwork.ir.execution.executable import Executable

WARM_UP = 3
"""Calls before those that are timed: the first compiles, the second may record."""


def held_rows(executable: Executable, width: int, past: int) -> int:
    """Rows that the caches hold of a text before such a step, at most."""
    most = executable.program.plan.cache.most
    return past if most is None else min(past, most - width)


def fill(executable: Executable, past: int) -> None:
    """Write random rows wherever those of a text of `past` tokens stand."""
    program = executable.program
    held = program.plan.cache.held
    for name, state in program.states.items():
        if state.capacity == SOURCE:  # what a call brings, if it brings anything
            continue
        own = held.get(state.capacity or "")
        rows = held_rows(executable, 1, past) if own is None else own.rows(past)
        for written in executable.read_rows([name], 0, 0, rows).values():
            floats = written.is_floating_point()
            random = torch.randn(written.shape) if floats else torch.randint(256, written.shape)
            executable.write_rows(0, 0, {name: random.to(written.dtype)})


def step_seconds(
    executable: Executable,
    width: int,
    past: int,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of one step of `width` tokens after a text of `past`, as the decode loop makes it.

    The mean over `repeats`.
    """
    steps = torch.arange(width)[None]
    inputs = {
        "tokens": torch.randint(1, 100, (1, width)),
        "positions": past + steps,
        "past": torch.tensor([held_rows(executable, width, past)]),
        "select": steps,
    }
    call = executable.hold("step", inputs, ("argmax",))
    for _ in range(WARM_UP):
        call()
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipes", default="baseline,int8")
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--past", type=int, default=128, help="tokens of the text before the step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    target = Target.parse(args.target, threads=args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    models = {r: gw.optimize(args.model, r, target=target) for r in args.recipes.split(",")}
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for model in models.values():
        model.executable.begin(1, args.past + max(args.widths))
        model.executable.reserve(args.past + max(args.widths))
        fill(model.executable, args.past)
    for _ in range(args.rounds):
        for width in args.widths:
            for recipe, model in models.items():
                seconds = step_seconds(model.executable, width, args.past, args.repeats, clock)
                times[recipe, width].append(1e3 * seconds)
    for recipe in models:
        medians = {w: statistics.median(times[recipe, w]) for w in args.widths}
        row = {
            "recipe": recipe,
            "median_ms": {w: round(t, 3) for w, t in medians.items()},
            "fastest_ms": {w: round(min(times[recipe, w]), 3) for w in args.widths},
            "over_width_1": {w: round(t / medians[args.widths[0]], 2) for w, t in medians.items()},
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
