"""What recipes that change weights cost in quality: perplexity on held-out text over float32's.

    python benchmarks/quality.py MODEL --text FOLDER [--files FILES.json] [--recipes int8,int4]
        [--target onnxruntime:cpu:float32] [--windows 48] [--length 512] [--json F]

The files (those of a JSON list, or of its field ``files``, relative to the folder; without it all
below the folder, by path; or one file) are joined in order and cut into windows; window i is tokens
i*length to (i+1)*length. Every recipe scores the same windows, each by itself, and each token but a
window's first counts. `windows` says which they were, with a hash of their tokens. The ratio of
perplexities is over ``baseline`` on the same target in float32; its error is the standard error of
the windows' paired differences. Bytes of weights are those that run, tokens/s those of plain greedy
decoding after each window's first half, recipes in turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from systems import System, optimized_model, take_turns, with_settings

import graftwork as gw

REFERENCE = "baseline"


def read_texts(folder: Path, files: Path | None) -> list[str]:
    """The texts to score, in order."""
    if folder.is_file():
        return [folder.read_text(encoding="utf-8")]
    if files is None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
    else:
        listed = json.loads(files.read_text())
        names = listed["files"] if isinstance(listed, dict) else listed
        paths = [folder / name for name in names]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def cut(model: gw.Model, texts: Sequence[str], length: int, most: int) -> torch.Tensor:
    """The first `most` windows i64[N,length]. Errors: `SystemExit` for too short a text."""
    ids: list[int] = []
    for text in texts:
        ids += model.tokenizer.encode(text).ids
        if len(ids) >= most * length:
            break
    count = min(most, len(ids) // length)
    if count < 2:
        raise SystemExit(f"--text: {len(ids)} tokens make no two windows of {length}")
    return torch.tensor(ids[: count * length]).view(count, length)


def losses(model: gw.Model, windows: torch.Tensor) -> list[float]:
    """Mean nats a token of each window, the first token aside."""
    found = []
    for window in windows:
        logits = model(window[None])[0, :-1]
        found.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    return found


def compared(own: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """The ratio of perplexities, and its standard error."""
    differences = [a - b for a, b in zip(own, reference, strict=True)]
    ratio = math.exp(statistics.mean(differences))
    return ratio, ratio * statistics.stdev(differences) / math.sqrt(len(differences))


def decoder(model: gw.Model) -> System:
    """The model as what continues prompts."""

    def run(prompts: Any, count: int) -> Any:
        model.forget()
        result = model.generate(
            torch.tensor(prompts),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        new = result.sequences[:, len(prompts[0]) :].tolist()
        return new, result.stats.decode_seconds, {}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--recipes", default="int8,int4")
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt; 0: no timing")
    parser.add_argument("--count", type=int, default=4, help="prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = list(dict.fromkeys([REFERENCE, *args.recipes.split(",")]))
    models = {
        name: optimized_model(args.model, with_settings(name, args.set), args.target, args.threads)
        for name in names
    }
    texts = read_texts(args.text, args.files)
    windows = cut(models[REFERENCE], texts, args.length, args.windows)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:12]
    which = f"0..{len(windows) - 1} of {args.length} tokens, sha256 {digest}"
    print(f"{args.model.name} on {args.target}, windows {which}")
    rows: dict[str, dict[str, Any]] = {}
    scored: dict[str, list[float]] = {}
    for name, model in models.items():
        scored[name] = losses(model, windows)
        ratio, error = compared(scored[name], scored[REFERENCE])
        memory = model.report.memory() if model.report is not None else None
        rows[name] = {
            "nats": round(statistics.mean(scored[name]), 4),
            "ratio": round(ratio, 5),
            "error": round(error, 5),
            "weight_bytes": memory.weights if memory is not None else None,
        }
    if args.tokens:
        prompts = [[window[: args.length // 2].tolist()] for window in windows[: args.count]]
        systems = {name: decoder(model) for name, model in models.items()}
        runs = take_turns(systems, prompts, args.tokens, args.rounds)
        for name, run in runs.items():
            rows[name]["tokens_per_second"] = round(run.rate, 1)
            rows[name]["over"] = round(run.over(runs[REFERENCE]), 3)
    for name, row in rows.items():
        print(f"{name:<24} {json.dumps(row)}")
    if args.json:
        report = {"model": args.model.name, "target": args.target, "windows": which, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
