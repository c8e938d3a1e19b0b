"""What recipes do on a GPU: a table of targets and recipes, against the memory's bandwidth.

    python benchmarks/random_llama.py --preset 1b --dtype bfloat16 --device cuda --out /tmp/llama1b
    python benchmarks/gpu.py /tmp/llama1b [/tmp/llama8b] --minutes 8 --json gpu.jsonl
    python benchmarks/draw.py speculation gpu.jsonl --out gpu.svg

A model's recipes run on each target and continue the same prompts greedily, beside transformers,
eager and with a static cache and torch.compile. tokens/s: of the decoding alone, the median of the
rounds. bandwidth: bytes of weights a second, as a share of what copies of the device's memory reach
(plain decoding reads every weight once a token). width: what a step of so many columns costs, as a
multiple of one column's. memory: the most that was allocated, over weights and caches. A row that
there is no time for says so. With --device cpu it shows itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from step_cost import step_seconds

import graftwork as gw
from graftwork.backends import Target
from graftwork.ir import GraftworkError

Row = dict[str, Any]
WIDTHS = (1, 8, 32, 64)
COPIED = 1 << 30
"""Bytes of the copies that the bandwidth is measured with."""

COLUMNS = ("model", "target", "recipe", "tokens/s", "bandwidth", "a step", *map(str, WIDTHS[1:]))
COLUMNS += ("graphs", "host us", "memory", "ready s")


def wait(device: str) -> None:
    """Return when the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str) -> float:
    """Bytes a second that a copy of a gigabyte reads and writes, the best of ten."""
    size = COPIED if device == "cuda" else COPIED >> 3
    source, into = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = 0.0
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        into.copy_(source)
        wait(device)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def most_memory(device: str) -> int:
    """Bytes that torch had allocated at most since this was last asked."""
    if device != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def ours(folder: Path, recipe: str, target: str, args: argparse.Namespace) -> Row:
    """One recipe on one target."""
    start = time.perf_counter()
    model = gw.optimize(folder, recipe, target=Target.parse(target))
    prompts = prompt_ids(model.program.info.vocab_size, args.prompts)
    rates, steps, host = [], [], []
    for turn in range(args.rounds + 1):
        seconds = tokens = 0.0
        for prompt in prompts:
            model.forget()
            found = model.generate(
                prompt,
                max_new_tokens=args.tokens,
                do_sample=False,
                eos_token_id=[],
                return_dict_in_generate=True,
            )
            seconds += found.stats.decode_seconds
            tokens += args.tokens - 1
            steps.append(float(found.stats.accepted_per_step))
            host.append(1e6 * float(found.stats.host_overhead))
        if turn:
            rates.append(tokens / seconds)
        else:  # the first compiles and records
            ready = time.perf_counter() - start
    executable = model.executable
    executable.begin(1, 256)
    executable.reserve(256)
    # Plain decoding needs one width, and shows what all of them would cost.
    drafts = model.program.plan.columns > 0
    own = (drafts and executable.widths("step").each) or args.widths
    costs = {w: step_seconds(executable, w, 64, 10) for w in args.widths if w in own}
    return {
        "rate": statistics.median(rates),
        "tokens_per_step": statistics.mean(steps),
        "weights": executable.memory().weights,
        "width_ms": {str(width): 1e3 * cost for width, cost in costs.items()},
        "graphs": len(getattr(executable, "captured", ())),
        "host_us": statistics.median(host),
        "memory": most_memory(args.device) / max(1, executable.memory().total),
        "ready": ready,
    }


def theirs(folder: Path, recipe: str, target: str, args: argparse.Namespace) -> Row:
    """transformers, eager or compiled with a static cache."""
    from graftwork.frontends.huggingface.model import load_model

    dtype = Target.parse(target).dtype
    start = time.perf_counter()
    model = load_model(folder, dtype=dtype).to(args.device).eval()
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "do_sample": False}
    if recipe.endswith("static"):
        options["cache_implementation"] = "static"
    prompts = [p.to(args.device) for p in prompt_ids(model.config.vocab_size, args.prompts)]
    rates, ready = [], 0.0
    for turn in range(args.rounds + 1):
        seconds = 0.0
        for prompt in prompts:
            for count, sign in ((args.tokens, 1), (1, -1)):
                wait(args.device)
                begun = time.perf_counter()
                model.generate(prompt, **{**options, "max_new_tokens": count})
                wait(args.device)
                seconds += sign * (time.perf_counter() - begun)
        if turn:
            rates.append(len(prompts) * (args.tokens - 1) / seconds)
        else:
            ready = time.perf_counter() - start
    weights = sum(weight.nbytes for weight in model.parameters())
    memory = most_memory(args.device) / weights
    return {"rate": statistics.median(rates), "weights": weights, "memory": memory, "ready": ready}


def prompt_ids(vocabulary: int, count: int) -> list[torch.Tensor]:
    """Random prompts i64[1,64], the same for everybody."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(1, vocabulary, (count, 1, 64), generator=generator))


def measured(make: Callable[..., Row], given: Row, args: argparse.Namespace) -> Row:
    """A row, or why there is none: the rows after it are made all the same."""
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        most_memory(args.device)
    try:
        return {**given, **make(Path(given["folder"]), given["recipe"], given["target"], args)}
    except (GraftworkError, torch.OutOfMemoryError) as error:
        return {**given, "why": str(error).splitlines()[0]}
    except Exception as error:
        traceback.print_exc()
        return {**given, "why": f"{type(error).__name__}: {error}".splitlines()[0]}


def over_plain(row: Row, rows: list[Row]) -> float | None:
    """A row's rate over plain decoding's, of the same model on the same target, if there is one."""
    same = (r for r in rows if (r["model"], r["target"]) == (row["model"], row["target"]))
    plain = next((r for r in same if r["recipe"] == "baseline" and "rate" in r), None)
    return row["rate"] / plain["rate"] if plain and "rate" in row else None


def table(rows: list[Row], speed: float) -> Table:
    """What was measured, and what was not."""
    found = Table(*COLUMNS, title=f"copies reach {speed / 1e9:.0f} GB/s")
    for row in rows:
        start = [row["model"], row["target"], row["recipe"]]
        if "rate" not in row:
            found.add_row(*start, row["why"])
            continue
        share = row["rate"] * row["weights"] / speed / row.get("tokens_per_step", 1.0)
        costs = row.get("width_ms", {})
        ratios = [f"{costs[w] / costs['1']:.2f}" if w in costs else "" for w in COLUMNS[6:9]]
        found.add_row(
            *(*start, f"{row['rate']:.1f}", f"{share:.0%}", f"{row.get('tokens_per_step', 1):.2f}"),
            *(*ratios, str(row.get("graphs", "")), f"{row.get('host_us', 0):.0f}"),
            *(f"{row['memory']:.2f}", f"{row['ready']:.0f}"),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", help="checkpoint folders")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--recipes", default="baseline,copyspec,recycling,int8,int4")
    parser.add_argument("--backends", default="torch,onnxruntime")
    parser.add_argument("--alone", action="store_true", help="leave transformers out")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing after them")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write a line a row")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is usable here; --device cpu shows the table on the CPU")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    begun, speed, rows = time.perf_counter(), bandwidth(args.device), []
    for folder in args.models:
        peers = [] if args.alone else ["transformers", "transformers static"]
        backends, recipes = args.backends.split(","), args.recipes.split(",")
        plan = [(theirs, "torch", peer) for peer in peers]
        plan += [(ours, backend, recipe) for backend in backends for recipe in recipes]
        for make, backend, recipe in plan:
            target = f"{backend}:{args.device}:{args.dtype}"
            given = {"folder": str(folder), "model": folder.name, "target": target}
            given |= {"recipe": recipe, "device": name, "date": time.strftime("%Y-%m-%d")}
            late = time.perf_counter() - begun > 60 * args.minutes
            row = {**given, "why": "no time"} if late else measured(make, given, args)
            print(f"{folder.name} {target} {recipe}: {row.get('rate', row.get('why'))}", flush=True)
            rows.append({"tokens_per_step": 1.0, **row})
            for row in rows:
                row["vs_plain"] = over_plain(row, rows)
            if args.json:  # at once: who is given a machine for a time has no more than that
                args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Console(width=160).print(table(rows, speed))


if __name__ == "__main__":
    main()
