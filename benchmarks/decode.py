"""Decode speed of recipes, transformers and onnxruntime-genai: one run, in turns, medians.

    python benchmarks/decode.py MODEL [--prompts FILE.jsonl] [--recipes baseline,copyspec]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--genai fp32,int4] [--threads 2]

MODEL is a checkpoint folder (or set GRAFTWORK_BENCH_MODEL); prompts are lines with a field
``ids``, random ids without a file. A system's rate is its new tokens after the first, divided by
the time they took; ``first_ms`` is the time up to the first one. onnxruntime-genai runs the model
that its own builder exports from the same checkpoint, with the same number of threads. Systems
take turns (see `systems`); rates and ratios are medians over the rounds. The rate of the fastest
round is printed too: on a busy machine it is nearest to what the system can do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from systems import (
    Batch,
    Result,
    System,
    optimized,
    read_prompts,
    take_turns,
    transformers_eager,
)


def genai(folder: Path, precision: str, threads: int, cache: Path) -> System:
    """onnxruntime-genai on its own export of the checkpoint."""
    import onnxruntime_genai as library

    out = cache / f"{folder.name}-{precision}"
    if not (out / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-i", str(folder), "-o", str(out), "-p", precision, "-e", "cpu"]
        command += ["-c", str(cache / "cache")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    path = out / "genai_config.json"
    config = json.loads(path.read_text())
    options = config["model"]["decoder"]["session_options"]
    options["intra_op_num_threads"], options["inter_op_num_threads"] = threads, 1
    path.write_text(json.dumps(config, indent=1))
    model = library.Model(str(out))

    def run(prompts: Batch, count: int) -> Result:
        (prompt,) = prompts
        params = library.GeneratorParams(model)
        length = len(prompt) + count
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = library.Generator(model, params)
        begun = time.perf_counter()
        generator.append_tokens(list(prompt))
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(count - 1):
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        new = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return [new], seconds, {"first_ms": 1e3 * (start - begun)}

    return run


def compare(
    systems: dict[str, System],
    peers: Sequence[str],
    prompts: Sequence[Sequence[int]],
    count: int,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Rates of all systems, in turns, also over the peers'; tokens compared with the first's."""
    runs = take_turns(systems, [[prompt] for prompt in prompts], count, rounds)
    first = runs[next(iter(systems))]
    return {
        name: {
            "tokens_per_second": round(run.rate, 2),
            "fastest_round": round(max(run.rates), 2),
            "over": {peer: round(run.over(runs[peer]), 3) for peer in peers},
            "same_texts": sum(a == b for a, b in zip(first.texts, run.texts, strict=True)),
            "of": len(prompts),
            **{key: round(statistics.mean(v), 2) for key, v in run.figures.items()},
        }
        for name, run in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, nargs="?", default=os.environ.get("GRAFTWORK_BENCH_MODEL")
    )
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--recipes", default="baseline")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32")
    parser.add_argument("--genai", default="", help="precisions, such as fp32,int4")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/graftwork-bench"))
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model is None:
        parser.error("name a checkpoint folder, or set GRAFTWORK_BENCH_MODEL")
    folder = Path(args.model)
    torch.set_num_threads(args.threads)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    prompts = read_prompts(args.prompts, args.count, args.length, vocab)
    systems: dict[str, System] = {"transformers eager float32": transformers_eager(folder)}
    for precision in filter(None, args.genai.split(",")):
        name = f"onnxruntime-genai {precision}"
        systems[name] = genai(folder, precision, args.threads, args.cache)
    peers = list(systems)
    for target in args.targets.split(","):
        for recipe in args.recipes.split(","):
            systems[f"{recipe} {target}"] = optimized(folder, recipe, target, args.threads)
    rows = compare(systems, peers, prompts, args.tokens, args.rounds)
    for name, row in rows.items():
        print(f"{name:<36} {json.dumps(row)}")
    if args.json:
        args.json.write_text(json.dumps({"model": folder.name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
