"""What exported ONNX folders cost next to graftwork's own loop: ms a prompt, systems in turns.

    python benchmarks/onnx_exports.py MODEL --prompts PROMPTS.jsonl --recipes baseline,copyspec
        [--count 4] [--tokens 128] [--length 128] [--rounds 5] [--threads 1]
        [--set medusa.draft_medusa.weights=HEADS] [--processor]

For each recipe: the model; `loop`, generate.onnx of --format onnx-loop; `plan`, run.py of --format
onnx-plan; each continues the same prompts, prompt's step included, and must say the same tokens
(`equal`: prompts of which all do). Ratios compare times of the same round with the model's, and are
medians over the rounds. --processor counts processor time, for a machine that others use, too: with
one thread, because others spin.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from systems import optimized_model, read_prompts, settle

from graftwork.ir import UnsupportedError
from graftwork.recipe import Recipe

Run = Callable[[list[int], int], list[int]]


def by_model(model: Any) -> Run:
    """graftwork's own loop, from nothing each time."""

    def run(prompt: list[int], count: int) -> list[int]:
        model.forget()
        ids = model.generate([prompt], max_new_tokens=count, eos_token_id=[], do_sample=False)
        return ids[0, len(prompt) :].tolist()

    return run


def by_loop(folder: Path, threads: int) -> Run:
    """One call of generate.onnx."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(
        str(folder / "generate.onnx"), options, ["CPUExecutionProvider"]
    )

    def run(prompt: list[int], count: int) -> list[int]:
        feeds = {
            "input_ids": np.array([prompt]),
            "lengths": np.array([len(prompt)]),
            "max_new": np.array(count),
            "eos": np.zeros(0, np.int64),
        }
        return session.run(None, feeds)[0][0].tolist()

    return run


def by_plan(folder: Path, threads: int) -> Run:
    """run.py of a plan folder."""
    spec = importlib.util.spec_from_file_location("run", folder / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    runner = module.Runner(folder, threads)
    return lambda prompt, count: runner.generate(prompt, count, eos=[])


def systems(model: Any, folder: Path, threads: int) -> dict[str, Run]:
    """The model and its exports, by name; what a format refuses is left out and said."""
    found: dict[str, Run] = {"model": by_model(model)}
    makers = {"loop": (model.export_onnx_loop, by_loop), "plan": (model.export_onnx_plan, by_plan)}
    for name, (export, run) in makers.items():
        try:
            found[name] = run(export(folder / name), threads)
        except (UnsupportedError, SystemExit) as error:
            print(f"  {name}: refused: {error}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, help="random ids without")
    parser.add_argument("--recipes", default="baseline,copyspec")
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE")
    parser.add_argument("--count", type=int, default=4, help="prompts")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor", action="store_true", help="processor time")
    args = parser.parse_args()
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab)
    target = "onnxruntime:cpu:float32"
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in args.recipes.split(","):
            prefix = f"{recipe}."
            given = [s.removeprefix(prefix) for s in args.set if s.startswith(prefix)]
            chosen = Recipe.load(recipe).with_options(given)
            model = optimized_model(args.model, chosen, target, args.threads)
            print(recipe)
            compare(systems(model, Path(scratch) / Path(recipe).stem, args.threads), prompts, args)


def compare(found: dict[str, Run], prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Time the systems in turns and print a line for each."""
    texts = {name: [run(p, args.tokens) for p in prompts] for name, run in found.items()}
    clock = time.process_time if args.processor else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(args.rounds):
        for name, run in found.items():
            settle()
            start = clock()
            for prompt in prompts:
                run(prompt, args.tokens)
            times[name].append((clock() - start) / len(prompts))
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(seconds, times["model"], strict=True)]
        alike = [a == b for a, b in zip(texts[name], texts["model"], strict=True)]
        row = {
            "median_ms": round(1e3 * statistics.median(seconds), 1),
            "over_model": round(statistics.median(ratios), 3),
            "equal": f"{sum(alike)}/{len(alike)}",
        }
        print(f"  {name:<8} {json.dumps(row)}")


if __name__ == "__main__":
    main()
