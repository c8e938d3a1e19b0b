"""Every recipe on real models: does it build, what does it keep, what does it save.

    python benchmarks/real.py MODEL [MODEL ...] --text NAME=FILE [--text NAME=FILE ...]
        --prompts PROMPTS.jsonl [--calibration FILE] [--corpus FILE.json] [--draft MODEL]
        [--recipes A,B,...]
        [--set RECIPE.PASS.OPTION=VALUE ...] [--target onnxruntime:cpu:float32] [--count 8]
        [--tokens 64] [--opened 2] [--threads 2]
        --json F [--svg F] [--markdown F]

MODEL: a checkpoint folder or a .gguf file. Every recipe of every model is a cell, beside the plain
model (`baseline`); what stands in `json` is not measured again. `set` changes a recipe's options:
such a row stands beside the recipe's own, and is not drawn. A cell:

    made        seconds of `optimize`
    weights     bytes, over the plain model's
    caches      bytes of the states after 2,048 tokens, likewise, where they hold other rows
    same        prompts whose text is the plain model's own, and the share of its tokens before the
                first other one (greedy, `tokens` new tokens of `count` prompts)
    accepted    tokens a step
    speed       tokens a second over the plain model's, in turns, median of the prompts; both are
                opened anew for every second prompt (`opened`), for where weights lie is luck
    prompt      seconds until the first token, the plain model's over the recipe's, likewise
    NAME        of each text: KL(plain || recipe) in nats a token, perplexity over the plain model's
                with its standard error, and the share of the likeliest tokens that are the same, on
                1,024 tokens by the path that generates, in windows of 256, or on 2,048 at once
                where caches hold or read other rows; of approximate recipes

or why there is none: what the recipe says that refuses, or what it needs that nobody gave. Heads
that need training are untrained here: they show that the text stays, not what they gain.

A line of PROMPTS.jsonl has ``text``, or token ids under the name of the model's folder or file.
`calibration` is read by recipes that ask for text, `corpus` by those that draft from one, and
`draft` is the smaller model of those that take one; such a row names it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from systems import settle, with_guests, with_settings

import graftwork as gw
from graftwork.backends import Target
from graftwork.backends.tiles import kernel_name
from graftwork.data.cost import Remembered, cost_of
from graftwork.ir.plan.contract import changes
from graftwork.measuring.agreement import OwnText
from graftwork.passes.engine.base import Effect
from graftwork.recipe import Recipe, recipes

TOKENS, ROWS = 1024, 2048
"""Of each text that are predicted; where caches hold or read other rows, which takes long texts."""
LEARNT = 64 * 512
"""Tokens that recipes which read text are given at most."""
GUESTS = ("a draft model", "a smaller model", "an amateur model", "a reference model")
ASKED = ("a corpus file", *GUESTS, "several processes (torchrun)")
"""What recipes cannot do without."""
LIMIT = 1800
"""Seconds of a cell."""
OPENED = 2
"""Prompts after which both models are opened anew, unless told: a float32 model of 135M parameters
is up to a quarter faster or slower by the pages that its copy of the weights got."""
LEAST, MOST = 1e-4, 10.0
"""Nats a token where the picture ends; what is beyond is drawn there."""


def documents(path: Path, model: gw.Model, most: int) -> list[list[int]]:
    """Token ids of a file's first texts, `most` in all: one text, or a .jsonl of ``text``."""
    whole = path.read_text(encoding="utf-8")
    texts = [whole]
    if path.suffix == ".jsonl":
        texts = [json.loads(line)["text"] for line in whole.splitlines()]
    found: list[list[int]] = []
    for text in texts:
        left = most - sum(map(len, found))
        if left <= 0:
            break
        found.append(model.tokenizer.encode(text).ids[:left])
    return found


def prompts_of(path: Path, model: gw.Model, name: str, count: int) -> list[torch.Tensor]:
    """The first prompts of a file, i64[1,S] each."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    ids = [row.get(name) or model.tokenizer.encode(row["text"]).ids for row in rows]
    return [torch.tensor([each]) for each in ids]


def lacking(recipe: Recipe, args: argparse.Namespace) -> str:
    """What a recipe needs that nobody gave; "" if nothing."""
    if recipe.reads_text and args.calibration is None:
        return "needs calibration text"
    brought = {"a corpus file": args.corpus, **dict.fromkeys(GUESTS, args.draft)}
    given = {what for what, value in brought.items() if value is not None}
    wanted = [what for what in recipe.brought if what in ASKED and what not in given]
    return f"needs {wanted[0]}" if wanted else ""


class Plain:
    """A model as it is, which every recipe is set beside."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.path, self.args = path, args
        self.target = Target.parse(args.target, threads=args.threads)
        self.model = gw.optimize(path, "baseline", target=self.target)
        self.reading = Remembered(self.model)
        self.prompts = prompts_of(args.prompts, self.model, path.stem, args.count)

    def texts(self, most: int) -> Iterator[tuple[str, list[list[int]]]]:
        for said in self.args.text:
            label, _, file = said.partition("=")
            yield label, documents(Path(file), self.model, most)

    def made(self, recipe: Recipe) -> gw.Model:
        """Errors: `GraftworkError` where the recipe refuses."""
        recipe = with_guests(recipe, self.args.corpus, self.args.draft)
        data = None
        if recipe.reads_text:
            data = documents(self.args.calibration, self.model, LEARNT)
        return gw.optimize(self.path, recipe, target=self.target, data=data)


def write(model: gw.Model, prompt: torch.Tensor, tokens: int) -> Any:
    model.forget()
    settle()
    asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    return model.generate(prompt, return_dict_in_generate=True, **asked)


def cell(plain: Plain, recipe: Recipe) -> dict[str, Any]:
    """A recipe's figures on a model."""
    args = plain.args
    row: dict[str, Any] = {"model": plain.path.name, "recipe": recipe.name}
    row["kernels"] = kernel_name()
    row["contract"] = recipe.contract
    if why := lacking(recipe, args):
        return row | {"none": why}
    start = time.perf_counter()
    try:
        made = plain.made(recipe)
    except gw.GraftworkError as error:
        said = str(error).replace(str(plain.path), plain.path.name)
        return row | {"none": f"refused: {said}"}
    if guests := [model for step in recipe.steps for model in step.pass_.models]:
        row["draft"] = Path(guests[0] or args.draft).name
    row["made"] = time.perf_counter() - start
    assert made.report is not None and plain.model.report is not None
    row["untrained"] = bool({"trained heads", "a tuned target"} & {*recipe.brought})
    row["weights"] = made.report.weight_bytes_after / plain.model.report.weight_bytes_after
    both: tuple[gw.Model, ...] = ()
    texts, steps, decode, prefill = [], [], [], []
    for index, prompt in enumerate(plain.prompts):
        if index % args.opened == 0:
            both = ()  # their memory is free for the next
            both = (replace(plain.model), replace(made))
            for model in both:  # pages are touched, and the steps of drafts compiled
                write(model, plain.prompts[0], 8)
        found = [write(model, prompt, args.tokens) for model in both]
        texts.append([each.sequences[0, prompt.shape[1] :].tolist() for each in found])
        one, other = (each.stats for each in found)
        steps.append(other.accepted_per_step)
        decode.append(other.tokens_per_second / one.tokens_per_second)
        prefill.append(one.prefill_seconds / other.prefill_seconds)
    kept = OwnText.of(texts)
    row |= {"texts": kept.texts, "same": kept.equal, "kept": kept.share}
    row |= {"accepted": statistics.mean(steps), "opened": args.opened}
    row |= {"speed": statistics.median(decode), "prompt": statistics.median(prefill)}
    if changes(recipe.contract):
        rows = any(Effect.CACHE_CONTENTS in step.pass_.effects for step in recipe.steps)
        for label, ids in plain.texts(ROWS if rows else TOKENS):
            row[label] = cost_of(made, plain.reading, ids).model_dump(exclude={"text", "speed"})
        if rows and args.text:
            row["caches"] = made.cache_bytes() / plain.model.cache_bytes()
    return row


def work(args: argparse.Namespace) -> None:
    """The cells of one model, a line of JSON each."""
    torch.set_num_threads(args.threads)
    plain = Plain(args.models[0], args)
    for name in args.recipes.split(","):
        start = time.perf_counter()
        row = cell(plain, with_settings(name, args.set))
        row["seconds"] = round(time.perf_counter() - start)
        print(json.dumps(rounded(row)), flush=True)


def settings_of(name: str, settings: list[str]) -> list[str]:
    """Those of ``recipe.pass.option=value`` that are a recipe's, without its name."""
    return [rest for owner, _, rest in (one.partition(".") for one in settings) if owner == name]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def told_of(cost: dict[str, Any]) -> str:
    """What a text costs, as in the tables."""
    divergence, ratio = max(cost["divergence"], 0.0), f"{cost['ratio']:.3f} ± {cost['error']:.3f}"
    return f"{divergence:.4f}, {ratio}, {cost['agreement']:.1%}"


def markdown(rows: list[dict[str, Any]], labels: list[str]) -> str:
    """A table a family, of each recipe the models in turn. Recipes that need what nobody gave are
    named below it."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    parts = []
    for kind in FAMILIES:
        own = [row for row in rows if family(row["recipe"]) == kind]
        own.sort(key=lambda row: (row["recipe"], models.index(row["model"])))
        shown = [row for row in own if "none" not in row and row["recipe"] != "baseline"]
        caches = any("caches" in row for row in shown)
        head = ["recipe", "model", "made in", "weights", *["caches"] * caches, "texts"]
        head += ["tokens a step", "speed", "prompt", *labels]
        lines = [f"## {TITLES[kind]}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for row in shown:
            costs = [row.get(label) for label in labels]
            told = [told_of(cost) if cost else "" for cost in costs]
            held = [f"{row['caches']:.2f}" if "caches" in row else ""] * caches
            cells = [
                f"`{row['recipe']}`"
                + "".join(f", `{one}`" for one in row.get("set", []))
                + (f", draft `{row['draft']}`" if "draft" in row else "")
                + (", untrained" if row["untrained"] else ""),
                *(row["model"], f"{row['made']:.0f} s", f"{row['weights']:.2f}", *held),
                *(f"{row['same']}/{row['texts']} ({row['kept']:.0%})", f"{row['accepted']:.2f}"),
                *(f"{row['speed']:.2f}", f"{row['prompt']:.2f}", *told),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        reasons: dict[str, list[str]] = {}
        for row in own:
            if "none" in row:
                reasons.setdefault(row["none"], []).append(f"`{row['recipe']}` ({row['model']})")
        lines += ["", *(f"- {', '.join(names)}: {why}" for why, names in reasons.items())]
        if shown or reasons:
            parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


TITLES = {
    "bits": "Fewer bits",
    "cache": "The cache",
    "drafts": "Drafts",
    "layers": "Less work",
    "others": "Others",
}
FAMILIES = tuple(TITLES)


def family(name: str) -> str:
    """What a recipe does, by what its passes do that are not `baseline`'s."""
    plain = {step.pass_.name for step in Recipe.load("baseline").steps}
    own = [s.pass_ for s in Recipe.load(name).steps if s.pass_.name not in plain]
    effects = {effect for each in own for effect in each.effects}
    told = (
        any(each.name.startswith("draft_") or "drafts" in each.provides for each in own),
        Effect.WEIGHT_NUMERICS in effects,
        bool(effects & {Effect.CACHE_CONTENTS, Effect.CACHE_LAYOUT}),
        bool(effects & {Effect.SEGMENTS, Effect.LAYER_SET}),
    )
    kinds = ("drafts", "bits", "cache", "layers")
    return next((kind for kind, holds in zip(kinds, told, strict=True) if holds), "others")


def draw(rows: list[dict[str, Any]], labels: list[str], path: Path) -> None:
    """A row a recipe, by family: speed over plain, and what it costs each text. A model has a
    colour; a hollow dot is a recipe whose heads are untrained, a triangle one that keeps the text.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in rows if "none" not in row and row["recipe"] != "baseline"]
    names = sorted({row["recipe"] for row in shown}, key=lambda n: (FAMILIES.index(family(n)), n))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(
        1, 1 + len(labels), figsize=(4 + 3 * len(labels), 1 + 0.17 * len(names)), sharey=True
    )
    for row in shown:
        place, color = names.index(row["recipe"]), f"C{models.index(row['model'])}"
        filled = "none" if row["untrained"] else color
        axes[0].scatter(row["speed"], place, s=16, edgecolors=color, facecolors=filled)
        for axis, label in zip(axes[1:], labels, strict=True):
            cost = row.get(label)
            mark = "<" if cost is None else "o"
            spot = LEAST if cost is None else min(max(cost["divergence"], LEAST), MOST)
            axis.scatter(spot, place, s=16, marker=mark, edgecolors=color, facecolors=filled)
    for axis, label in zip(axes, ["speed over plain", *labels], strict=True):
        costs = axis is not axes[0]
        axis.set(xscale="log", xlabel=f"KL on {label}, nats a token" if costs else label)
        axis.grid(visible=True, linewidth=0.3)
        for place in range(1, len(names)):
            if family(names[place]) != family(names[place - 1]):
                axis.axhline(place - 0.5, color="black", linewidth=0.8)
    axes[0].axvline(1, color="grey", linewidth=1)
    ticks = [0.25, 0.5, 1, 2, 4]
    axes[0].set_xticks(ticks, map(str, ticks))
    axes[0].minorticks_off()
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    kinds = [family(name) for name in names]
    for kind in dict.fromkeys(kinds):
        middle = kinds.index(kind) + (kinds.count(kind) - 1) / 2
        axes[-1].annotate(
            kind,
            (1.02, middle),
            xycoords=("axes fraction", "data"),
            rotation=90 if kinds.count(kind) > len(kind) else 0,  # a row holds a line, not a word
            va="center",
            fontsize=8,
            annotation_clip=False,
        )
    for index, model in enumerate(models):
        axes[0].scatter([], [], color=f"C{index}", label=model)
    figure.legend(loc="upper right", ncols=len(models), fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.savefig(path)
    print(f"drawn: {path}")


def worked(path: Path, names: list[str], given: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of recipes, from a process of their own; the last says why if it ends before all
    are made."""
    command = [sys.executable, __file__, str(path), *given, "--recipes", ",".join(names), "--work"]
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
        assert process.stdout is not None
        left = list(names)
        while left:
            begun, timer = time.monotonic(), threading.Timer(LIMIT, process.kill)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            if line.startswith('{"model"'):
                left.pop(0)
                yield json.loads(line)
        if process.wait() == 0:
            return
        told.seek(0)
        why = told.read().strip().rpartition("\n")[2]
    late = process.returncode == -signal.SIGKILL and time.monotonic() - begun >= LIMIT
    row = {"model": path.name, "recipe": left[0], "contract": Recipe.load(left[0]).contract}
    fault = f"failed with exit code {process.returncode}: {why}"
    yield row | {"none": f"no row within {LIMIT:,} seconds" if late else fault}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--draft", type=Path, metavar="MODEL")
    parser.add_argument("--recipes", default=",".join(recipe.name for recipe in recipes()))
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE")
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--opened", type=int, default=OPENED, metavar="PROMPTS")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    strange = [one for one in args.set if one.partition(".")[0] not in args.recipes.split(",")]
    if strange:
        parser.error(f"--set {strange[0]}: expected one of --recipes before the first dot")
    for name in args.recipes.split(","):
        with_settings(name, args.set)  # what is wrong with them is said before the slow part
    rows: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    for path in args.models:
        known = [(r["recipe"], r.get("set", [])) for r in rows if r["model"] == path.name]
        asked = args.recipes.split(",")
        left = [n for n in asked if (n, settings_of(n, args.set)) not in known]
        while left:
            for row in worked(
                path, left, [a for a in sys.argv[1:] if a not in map(str, args.models)]
            ):
                left.remove(row["recipe"])
                row |= {"set": mine} if (mine := settings_of(row["recipe"], args.set)) else {}
                rows.append(row)
                print(json.dumps(row), flush=True)
                args.json.write_text(json.dumps(rows, indent=1))
    labels = [said.partition("=")[0] for said in args.text]
    if args.markdown:
        args.markdown.write_text(markdown(rows, labels))
    if args.svg and labels:
        draw([row for row in rows if "set" not in row], labels, args.svg)


if __name__ == "__main__":
    main()
