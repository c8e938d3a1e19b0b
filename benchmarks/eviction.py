"""What caches with a budget cost in quality: perplexity, and whether an early key is still known.

    python benchmarks/eviction.py MODEL --text FOLDER [--files FILES.json] [--budgets 50,25]
        [--recipes streaming_llm,knorm,...] [--length 512] [--windows 16] [--block 32]
        [--target onnxruntime:cpu:float32] [--json F] [--svg F]

Windows are cut as in quality.py, and each is scored as `generate` would run it: piece by piece,
rows dropped where they are dropped in decoding. perplexity: over the full cache's on the same
windows, every token but the first; its error is the standard error of the paired differences. key:
a line with a random key is put after the window's first eighth and begun again at its end; nats a
token of the key there, which a model that sees the line copies. Budgets are percents of the length,
rounded to blocks; bytes are those of the state buffers, over the full cache's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from quality import compared, cut, losses, read_texts
from systems import Target, optimized_model

import graftwork as gw
from graftwork.recipe import Recipe

METHODS = "streaming_llm,knorm,keydiff,tova,snapkv,h2o,expected_attention,pyramidkv"
KEY = 8
"""Characters of a key."""


def planted(model: gw.Model, windows: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
    """Windows with a key in them, and how many tokens at their end are the key again."""
    found, draw = [], random.Random(0)
    for window in windows:
        value = "".join(draw.choice("abcdefghjkmnpqrstuvwxyz23456789") for _ in range(KEY))
        line = f'\nACCESS_KEY = "{value}"\n'
        ids = model.tokenizer.encode(line).ids
        begin = model.tokenizer.encode('\nACCESS_KEY = "').ids
        end = ids[len(begin) :]
        room = len(window) - len(ids) - len(ids)
        eighth = len(window) // 8
        text = [*window[:eighth].tolist(), *ids, *window[eighth:room].tolist(), *ids]
        found.append((torch.tensor(text), len(end)))
    return found


def key_nats(model: gw.Model, windows: list[tuple[torch.Tensor, int]]) -> float:
    """Mean nats a token of the keys at the windows' ends."""
    total = []
    for window, count in windows:
        logits = model(window[None])[0, -count - 1 : -1]
        total.append(torch.nn.functional.cross_entropy(logits, window[-count:]).item())
    return statistics.mean(total)


def settings(recipe: str, budget: int, block: int) -> Recipe:
    """A recipe with this budget; what else it keeps stays within that."""
    options = [f"evict_cache.budget={budget}", f"evict_cache.block={block}"]
    return Recipe.load(recipe).with_options(options)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels, a line a method: perplexity and nats on the key, over the budget."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name in dict.fromkeys(row["recipe"] for row in rows if row["recipe"] != "baseline"):
        mine = [row for row in rows if row["recipe"] in (name, "baseline")]
        percent = [row["budget_percent"] for row in mine]
        axes[0].plot(percent, [100 * (row["ratio"] - 1) for row in mine], marker="o", label=name)
        axes[1].plot(percent, [row["key_nats"] for row in mine], marker="o", label=name)
    axes[0].set(xlabel="rows kept, % of the text", ylabel="% worse perplexity")
    axes[1].set(xlabel="rows kept, % of the text", ylabel="nats a token of the key")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(percent, [f"{p:g}" for p in percent])
        axis.minorticks_off()
        axis.grid(visible=True, linewidth=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path)
    print(f"drawn: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    parser.add_argument("--recipes", default=METHODS)
    parser.add_argument("--budgets", default="50,25")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    full = optimized_model(args.model, "baseline", args.target, args.threads)
    windows = cut(full, read_texts(args.text, args.files), args.length, args.windows)
    keys = planted(full, windows)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:12]
    which = f"{len(windows)} of {args.length} tokens, sha256 {digest}"
    print(f"{args.model.name} on {Target.parse(args.target)}, windows {which}")
    reference = losses(full, windows)
    whole = full.cache_bytes()
    rows = [{"recipe": "baseline", "budget_percent": 100.0, "budget": args.length, "ratio": 1.0}]
    rows[0] |= {"perplexity": math.exp(statistics.mean(reference)), "error": 0.0, "bytes": 1.0}
    rows[0]["key_nats"] = key_nats(full, keys)
    print(json.dumps(rows[0]), flush=True)
    for name in args.recipes.split(","):
        for percent in sorted(map(float, args.budgets.split(",")), reverse=True):
            budget = max(round(args.length * percent / 100 / args.block), 1) * args.block
            recipe = settings(name, budget, args.block)
            model = optimized_model(args.model, recipe, args.target, args.threads)
            own = losses(model, windows)
            ratio, error = compared(own, reference)
            row = {"recipe": name, "budget_percent": percent, "budget": budget, "ratio": ratio}
            row |= {"perplexity": math.exp(statistics.mean(own)), "error": error}
            row |= {"bytes": model.cache_bytes() / whole, "key_nats": key_nats(model, keys)}
            rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        report = {"model": args.model.name, "target": args.target, "windows": which, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1))
    if args.svg:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
