"""What small caches cost in quality: perplexity, and whether an early key is still known.

    python benchmarks/cache_quality.py MODEL --text FOLDER [--files FILES.json]
        [--budgets 100,50,25,12.5] [--calibration FOLDER]
        [--recipes streaming_llm,knorm,kivi:quantize_old_rows.bits=2,...] [--length 512]
        [--windows 16] [--block 32] [--rounds 0] [--memory] [--without-keys]
        [--target onnxruntime:cpu:float32] [--json F] [--svg F]

Recipes with a budget, of rows that are kept or that a token reads, are run with each of `budgets`,
others once; options of their passes may stand behind a recipe's name, one after a colon each.

Windows are cut as in quality.py, and each is scored as `generate` would run it: piece by piece,
rows dropped where they are dropped in decoding. perplexity: over the full cache's on the same
windows, every token but the first; its error is the standard error of the paired differences. key:
a line with a random key is put after the window's first eighth and begun again at its end; nats a
token of the key there, which a model that sees the line copies (not with `without-keys`). Budgets
are percents of the length, rounded to blocks; bytes are those of the state buffers, over the full
cache's; bits those that a number of a row takes, steps and all else beside its code included. With
`rounds` each recipe and the full cache write 32 tokens behind the rest of the first window in
turns, so many times: prompt and step are the seconds that these take (with one thread those of the
processor), over the full cache's in the same round, medians. With `memory` a process of its own
does so, too: peak is the most that is resident meanwhile, weights included, in MB.

Recipes that read text first read that of the files below `calibration` (or of that one), without
those that are scored; without it they are left out.

What stands in `json` already, of the same windows on the same target, is not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from memory import MB, resident
from quality import calibration_ids, compared, cut, losses, read_texts, text_paths
from systems import Target, optimized_model, text_parser

import graftwork as gw
from graftwork.recipe import Recipe

METHODS = (
    "streaming_llm,knorm,keydiff,tova,snapkv,h2o,less,expected_attention,pyramidkv,adakv,moa,citrus,actqkv,"
    "tidaldecode,double_sparsity,shadowkv,kv_int8,kv_int4,kv_int8_static,kv_int4_static,"
    + ",".join(
        f"{name}:quantize_old_rows.bits={bits}"
        for name, some in {
            "kivi": "8432",
            "rotatekv": "432",
            "kvquant": "432",
            "gear": "42",
        }.items()
        for bits in some
    )
)
CALIBRATION = 8 * 2048
"""Tokens that recipes may read first."""

STEPS = 32
"""Tokens that are written to tell how long a step takes."""

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


class Stamps:
    """A streamer that notes when a prompt is given, and each token is there. With one thread in
    seconds of the processor, which other programs on the machine hardly change."""

    def __init__(self, threads: int) -> None:
        self.clock = time.process_time if threads == 1 else time.perf_counter
        self.at: list[float] = []

    def put(self, value: Any) -> None:
        self.at.append(self.clock())

    def end(self) -> None:
        """Nothing is left to note."""


def written(model: gw.Model, window: torch.Tensor, threads: int) -> tuple[float, float]:
    """Seconds of a prompt, all of a window but `STEPS` tokens, and of each of these that follow."""
    stamps = Stamps(threads)
    asked = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    model.forget()
    model.generate(window[None, :-STEPS], streamer=stamps, **asked)
    begin, first, *_, last = stamps.at
    return first - begin, (last - first) / (STEPS - 1)


def pace(
    model: gw.Model, full: gw.Model, window: torch.Tensor, rounds: int, threads: int
) -> dict[str, float]:
    """The prompt's seconds, and a step's, over the full cache's in the same round: medians."""
    found = []
    for each in (model, full):  # what comes first compiles
        written(each, window[: 2 * STEPS], threads)
    for _ in range(rounds):
        both = [written(each, window, threads) for each in (model, full)]
        found.append([own / other for own, other in zip(*both, strict=True)])
    prompt, step = (statistics.median(ratios) for ratios in zip(*found, strict=True))
    return {"prompt": prompt, "step": step}


def peak(args: argparse.Namespace, said: list[str]) -> int:
    """MB of a process that runs a recipe, at most: see `run_alone`."""
    given = [str(args.model), "--text", str(args.text), "--target", args.target, "--alone"]
    given += [":".join(said), "--threads", str(args.threads), "--length", str(args.length)]
    given += ["--calibration", str(args.calibration)] if args.calibration else []
    given += ["--files", str(args.files)] if args.files else []
    told = subprocess.run([sys.executable, __file__, *given], check=True, stdout=subprocess.PIPE)
    return int(told.stdout.split()[-1])


def run_alone(args: argparse.Namespace) -> None:
    """Print the most resident memory, in MB, of a process that opens a saved model, while it writes
    `STEPS` tokens behind a prompt that fills the rest of a window.

    The same was written before: functions that drop or store rows are compiled when a text first
    is long enough, which takes more than they do. And making the model takes more than running it.
    """
    target = Target.parse(args.target, threads=args.threads)
    if args.saved is not None:
        model = gw.load(args.saved, target=target)
        window = torch.arange(args.length) % 1000 + 10
        written(model, window, args.threads)
        Path("/proc/self/clear_refs").write_text("5")  # the most that is resident begins anew
        written(model, window, args.threads)
        print(resident()["peak"] // MB)
        return
    name, *options = args.alone.split(":")
    recipe, data = Recipe.load(name).with_options(options), None
    if recipe.reads_text:
        plain = optimized_model(args.model, "baseline", args.target, args.threads)
        held = frozenset(path.resolve() for path in text_paths(args.text, args.files))
        data = calibration_ids(plain, args.calibration, held, CALIBRATION)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        gw.optimize(args.model, recipe, target=target, data=data).save(saved)
        subprocess.run([sys.executable, *sys.argv, "--saved", str(saved)], check=True)


def bits_of(model: gw.Model) -> dict[str, float]:
    """Bits that a number of a row takes, with all that is kept beside its code."""
    remarks = [remark for line in model.report.passes for remark in line.remarks]
    found = [re.search(r"take ([\d.]+) bits a number", remark) for remark in remarks]
    said = [float(match[1]) for match in found if match]
    return {"bits": said[0]} if said else {}


def settings(
    said: str, percents: list[float], length: int, block: int
) -> Iterator[tuple[str, list[str]]]:
    """A recipe as it was said, with each budget if it has one: its name and options; and how, in
    words."""
    name, *options = said.split(":")
    uses = {use.name for use in Recipe.load(name).with_options(options).passes}
    if not uses & {"evict_cache", "read_sparse", "read_chunks"}:
        yield ", ".join(option.split(".")[-1] for option in options), [name, *options]
        return
    for percent in sorted(percents, reverse=True):
        budget = max(round(length * percent / 100 / block), 1) * block
        rows = [f"evict_cache.budget={budget}", f"evict_cache.block={block}"]
        if "read_sparse" in uses:
            rows = [f"read_sparse.rows={budget}"]
        if "read_chunks" in uses:  # a block of the latest rows is read besides
            rows = [f"read_chunks.rows={budget - block}", f"read_chunks.block={block}"]
        yield f"{budget} rows", [name, *options, *rows]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Two panels, a line a method: perplexity, and nats on the key or a step's time, over bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 5.5), layout="constrained")
    full, *others = rows
    second = "key_nats" if "key_nats" in full else "step"
    colours = plt.get_cmap("tab20")
    for index, name in enumerate(dict.fromkeys(row["recipe"] for row in others)):
        mine = sorted((r for r in others if r["recipe"] == name), key=lambda r: -r["bytes"])
        share = [100 * row["bytes"] for row in mine]
        look = {"marker": "os^Dv<>"[index % 7], "color": colours(index % 20), "markersize": 4}
        worse = [100 * (row["ratio"] - 1) for row in mine]
        axes[0].plot(share, worse, label=name, **look)
        axes[1].plot(share, [row[second] for row in mine], label=name, **look)
    axes[0].axhline(0, color="grey", linewidth=0.6)
    axes[1].axhline(full[second], color="grey", linewidth=0.6)
    axes[0].set(ylabel="% worse perplexity")
    axes[0].set_yscale("symlog", linthresh=1)
    axes[0].set_ylim(bottom=min(-0.3, *(110 * (row["ratio"] - 1) for row in others)))
    texts = {
        "key_nats": "nats a token of the key",
        "step": "a step's seconds, over the full cache's",
    }
    axes[1].set(ylabel=texts[second])
    for axis in axes:
        axis.set(xlabel="bytes of the state buffers, % of the full cache's")
        axis.grid(visible=True, linewidth=0.3)
    named = axes[0].get_legend_handles_labels()
    figure.legend(*named, fontsize=8, ncols=6, loc="outside lower center")
    figure.savefig(path)
    print(f"drawn: {path}")


def known_rows(path: Path | None, report: dict[str, Any]) -> list[dict[str, Any]]:
    """What an earlier run has measured. Errors: `SystemExit` if it measured something else."""
    if path is None or not path.exists():
        return []
    earlier = json.loads(path.read_text())
    for key in ("model", "target", "windows"):
        if earlier[key] != report[key]:
            raise SystemExit(
                f"--json {path} holds {key} {earlier[key]!r}, expected {report[key]!r}: name "
                f"another file"
            )
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("--recipes", default=METHODS)
    parser.add_argument("--budgets", default="100,50,25,12.5")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--without-keys", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone:
        return run_alone(args)
    full = optimized_model(args.model, "baseline", args.target, args.threads)
    windows = cut(
        full.tokenizer, full.program, read_texts(args.text, args.files), args.length, args.windows
    )
    keys = [] if args.without_keys else planted(full, windows)
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:12]
    which = f"{len(windows)} of {args.length} tokens, sha256 {digest}"
    print(f"{args.model.name} on {Target.parse(args.target)}, windows {which}")
    report = {"model": args.model.name, "target": args.target, "windows": which, "rows": []}
    rows = known_rows(args.json, report)
    reference, whole = losses(full, windows), full.cache_bytes()
    percents = [float(percent) for percent in args.budgets.split(",")]
    wanted = [("", ["baseline"])]
    for said in args.recipes.split(","):
        wanted += settings(said, percents, args.length, args.block)
    for setting, (name, *options) in wanted:
        recipe = Recipe.load(name).with_options(options)
        if any((row["recipe"], row["setting"]) == (recipe.name, setting) for row in rows):
            continue
        if recipe.reads_text and args.calibration is None:
            print(f"{recipe.name} is left out: it reads text first, see --calibration")
            continue
        data = None
        if recipe.reads_text:
            held = frozenset(path.resolve() for path in text_paths(args.text, args.files))
            data = calibration_ids(full, args.calibration, held, CALIBRATION)
        target = Target.parse(args.target, threads=args.threads)
        model = gw.optimize(args.model, recipe, target=target, data=data)
        own = losses(model, windows)
        ratio, error = compared(own, reference)
        row = {"recipe": recipe.name, "setting": setting, "ratio": ratio, "error": error}
        row |= {"perplexity": math.exp(statistics.mean(own)), "bytes": model.cache_bytes() / whole}
        row |= bits_of(model)
        if keys:
            row["key_nats"] = key_nats(model, keys)
        if args.rounds:
            row |= pace(model, full, windows[0], args.rounds, args.threads)
        if args.memory:
            row["peak"] = peak(args, [name, *options])
        rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
        print(json.dumps(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(report | {"rows": rows}, indent=1))
    if args.svg:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
