"""What cuts cost and what leaving early gives: steps of one token of a model, in turns.

    python benchmarks/depth_cost.py MODEL [--cuts "exits: [3]" "every: 1"] [--exit 3]
        [--target onnxruntime:cpu:float32] [--steps 500] [--past 128] [--threads 1]

cuts: settings of cut_depth; every segment of such a step is called. exit: of `free`; a step leaves
there with a chance of 0.3, or stays and makes up for `lacking` rows. Steps of all kinds take turns,
one by one, in changing order. Shown are milliseconds and the ratio to the whole step, at the
fastest tenth, which other work on the machine hardly touches, and in the median; of cuts, too, what
a call more costs in microseconds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from systems import optimized_model

import graftwork as gw
from graftwork.passes.depth.deferred import DeferredPolicy
from graftwork.recipe import Recipe
from graftwork.runtime.asking.text import Text
from graftwork.runtime.depth.base import DEPTHS, StepFeed
from graftwork.runtime.feeding.feed import Feeder

FETCH = ("argmax",)
LEAVES = 0.3
"""How often a step leaves early."""

WARM_UP = 5
"""Steps of each kind before those that are timed."""

Kind = Callable[[], str]
"""Makes a step and says what it was."""


def cut(spec: str) -> Recipe:
    """Plain decoding by segments."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.yaml"
        passes = f"passes:\n  - cut_depth: {{{spec}}}\n"
        path.write_text(f"title: Cut\ncontract: exact\nextends: baseline\n{passes}")
        return Recipe.load(str(path))


def feeder_of(model: gw.Model, past: int) -> Feeder:
    """What feeds the model's steps, with room for a text."""
    step = model.program.plan.step
    feeder = Feeder(model.executable, 1, *step.fed(True), parts=step.parts)
    feeder.begin(2 * past, 8)
    return feeder


def steps_of(model: gw.Model, name: str, past: int) -> Kind:
    """Steps through all segments."""
    feeder = feeder_of(model, past)

    def step() -> str:
        feeder.run(StepFeed([[5]], [past], [past], FETCH, 1)).integers("argmax")
        return name

    return step


def leaving(model: gw.Model, past: int) -> Kind:
    """Steps under FREE's policy, whose threshold says at random who leaves."""
    record, chance = model.program.plan.depth, random.Random(0)
    text = Text([5] * (past + 1), 1, 2 * past, rows=past, position=past)
    policy = DEPTHS.find(record)(record, model.executable)
    assert isinstance(policy, DeferredPolicy)
    policy.begin(feeder_of(model, past), [text])

    def step() -> str:
        lacking = policy.lacking[0]
        leaves = chance.random() < LEAVES
        policy.learnt.record = replace(policy.record, threshold=0.0 if leaves else 1.0)
        # The rows that are lacking are those before this one.
        text.rows = text.position = past + lacking
        feed = StepFeed([[5]], [text.rows], [text.position], FETCH, 1)
        policy.feed(feed).integers("argmax")
        return "leaves" if policy.ran < policy.total else f"stays, {lacking} lacking"

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--cuts", nargs="*", default=["exits: [3]", "every: 1"])
    parser.add_argument("--exit", type=int)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--past", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipes = {"whole": Recipe.load("baseline"), **{spec: cut(spec) for spec in args.cuts}}
    models = {
        name: optimized_model(args.model, recipe, args.target, args.threads)
        for name, recipe in recipes.items()
    }
    kinds = [steps_of(model, name, args.past) for name, model in models.items()]
    if args.exit:
        at = [f"depth_deferred.exit={args.exit}", f"cut_depth.exits=[{args.exit}]"]
        free = Recipe.load("free").with_options(at)
        kinds.append(
            leaving(optimized_model(args.model, free, args.target, args.threads), args.past)
        )
    times: dict[str, list[float]] = defaultdict(list)
    order = random.Random(1)
    with torch.no_grad():
        for turn in range(WARM_UP + args.steps):
            for kind in order.sample(kinds, len(kinds)):
                start = time.perf_counter()
                name = kind()
                if turn >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
    found = {
        name: (statistics.quantiles(taken, n=10)[0], statistics.median(taken))
        for name, taken in times.items()
        if len(taken) > 1
    }
    for name in sorted(found, key=lambda name: (name not in models, name)):
        cells = [
            f"{1e3 * seconds:.3f} ({seconds / whole:.3f})"
            for seconds, whole in zip(found[name], found["whole"], strict=True)
        ]
        calls = len(models[name].program.plan.step.parts) - 1 if name in models else 0
        each = ""
        if calls > 0:
            more = [a - b for a, b in zip(found[name], found["whole"], strict=True)]
            each = f", a call more {', '.join(f'{1e6 * m / calls:.0f}' for m in more)} us"
        print(f"{name:<20} {', '.join(cells)}{each} ({len(times[name])} steps)")


if __name__ == "__main__":
    main()
