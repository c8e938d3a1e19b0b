"""What recipes that change weights cost in quality, beside float32, on held-out text.

    python benchmarks/quality.py MODEL --text FOLDER [--files FILES.json] [--recipes int8,int4]
        [--target onnxruntime:cpu:float32] [--windows 48] [--length 512] [--json F]
        [--calibration FOLDER] [--methods rtn,gptq --bits 4:32,3:32,2:64] [--work FOLDER]

The files (those of a JSON list, or of its field ``files``, relative to the folder; without it all
below the folder, by path; or one file; of a .jsonl the field ``text`` of each line) are joined in
order and cut into windows; window i is tokens i*length to (i+1)*length. Where texts of the model
begin with a token of their own, each window does, and has one less of the text. Every recipe scores
the same windows, each by itself, and each token but a window's first counts. `windows` says which
they were, with a hash of their tokens.

What is compared is ``baseline`` on the same target in float32. `kl`: the mean divergence from its
predictions, in nats a token; `agreement`: of how many tokens the likeliest is the same; `ratio`: of
perplexities, and `error` the standard error of that, from the windows' paired differences. Bytes of
weights are those that run, tokens/s those of plain greedy decoding after each window's first half,
recipes in turns.

Recipes that calibrate do so on the .py, .txt and .jsonl files below `calibration` (or on that one
file) that are not among the files to score, in an order that is shuffled once, as many as make
`calibration-tokens`; so do those that do better with text, if it is given. `methods` and `bits` add
a table: `quantize_weights` by each method in each number of bits and group, embedding and head in
float.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from systems import System, take_turns, text_parser, with_settings
from tokenizers import Tokenizer

import graftwork as gw
from graftwork.backends import Target
from graftwork.data.cost import Remembered
from graftwork.ir import Program
from graftwork.recipe import Recipe

REFERENCE = "baseline"
SHUFFLE = 0
"""The order of calibration files follows from it."""


def text_paths(folder: Path, files: Path | None) -> list[Path]:
    """The files to score, in order."""
    if folder.is_file():
        return [folder]
    if files is None:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    listed = json.loads(files.read_text())
    names = listed["files"] if isinstance(listed, dict) else listed
    return [folder / name for name in names]


def read_texts(folder: Path, files: Path | None) -> list[str]:
    """The texts to score, in order."""
    return [text for path in text_paths(folder, files) for text in texts_of(path)]


def texts_of(path: Path) -> list[str]:
    """The text of a file, or those of a .jsonl."""
    whole = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".jsonl":
        return [whole]
    return [json.loads(line)["text"] for line in whole.splitlines()]


def calibration_ids(
    model: gw.Model, source: Path, held: frozenset[Path], wanted: int
) -> list[list[int]]:
    """Documents of token ids, so many as make `wanted` tokens, of files that are not `held`.

    Errors: `SystemExit` if there are not so many.
    """
    paths = [source]
    if source.is_dir():
        kinds = (".py", ".txt", ".jsonl")
        paths = sorted(path for path in source.rglob("*") if path.suffix in kinds)
        random.Random(SHUFFLE).shuffle(paths)
    documents: list[list[int]] = []
    for path in paths:
        if path.resolve() in held or not path.is_file():
            continue
        for text in texts_of(path):
            documents.append(model.tokenizer.encode(text).ids)
            if sum(map(len, documents)) >= wanted:
                return documents
    raise SystemExit(f"--calibration: {sum(map(len, documents))} tokens, expected {wanted}")


def table_recipes(
    methods: Sequence[str], bits: Sequence[str], sample: Mapping[str, int]
) -> dict[str, Recipe]:
    """`quantize_weights` by each method, in each ``bits:group``, layers alone. sample: how much
    text is read."""
    made = {}
    for pair in bits:
        width, _, group = pair.partition(":")
        for method in methods:
            options = {"bits": int(width), "group": int(group), "method": method, **sample}
            passes = [{"quantize_weights": {**options, "embedding": False}}]
            name = f"{method} {width} bits g{group}"
            made[name] = Recipe.load({"name": name, "extends": "int4", "passes": passes})
    return made


def cut(
    tokenizer: Tokenizer, program: Program, texts: Sequence[str], length: int, most: int
) -> torch.Tensor:
    """The first `most` windows i64[N,length], each with the token that the program's texts begin
    with, where the tokenizer adds it. Errors: `SystemExit` for too short a text."""
    ids: list[int] = []
    bos = program.info.bos
    first = [bos] if tokenizer.encode("").ids[:1] == [bos] else []  # an end that is added is none
    own = length - len(first)
    for text in texts:
        ids += tokenizer.encode(text).ids[len(first) :]
        if len(ids) >= most * own:
            break
    count = min(most, len(ids) // own)
    if count < 2:
        raise SystemExit(f"--text: {len(ids)} tokens make no two windows of {length}")
    windows = torch.tensor(ids[: count * own]).view(count, own)
    return torch.cat([torch.tensor(first, dtype=torch.int64).expand(count, -1), windows], 1)


class Scores(NamedTuple):
    """Of each window: mean nats a token, the first aside; the divergence from the reference; and
    the share of tokens whose likeliest is the same."""

    nats: list[float]
    kl: list[float]
    agreement: list[float]


def scores(model: gw.Model | Remembered, reference: Remembered, windows: torch.Tensor) -> Scores:
    found = Scores([], [], [])
    for window in windows:
        wanted = reference(window[None])[0, :-1].float().log_softmax(-1)
        own = wanted
        if model is not reference:
            own = model(window[None])[0, :-1].float().log_softmax(-1)
        found.nats.append(torch.nn.functional.nll_loss(own, window[1:]).item())
        divergence = torch.nn.functional.kl_div(own, wanted, reduction="sum", log_target=True)
        found.kl.append(divergence.item() / len(own))
        found.agreement.append((own.argmax(-1) == wanted.argmax(-1)).float().mean().item())
    return found


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


def named(windows: torch.Tensor) -> str:
    """Which windows i64[N,T] these are."""
    digest = hashlib.sha256(windows.numpy().tobytes()).hexdigest()[:12]
    return f"0..{len(windows) - 1} of {windows.shape[1]} tokens, sha256 {digest}"


def table(rows: dict[str, dict[str, Any]], methods: Sequence[str], bits: Sequence[str]) -> str:
    """Divergences and ratios of perplexities by bits and method, in Markdown; bytes of the weights
    by bits."""
    lines = [f"| bits, group | MB | {' | '.join(methods)} |", "|---" * (len(methods) + 2) + "|"]
    for pair in bits:
        width, _, group = pair.partition(":")
        found = [rows[f"{method} {width} bits g{group}"] for method in methods]
        cells = [f"{row['kl']:.4f} / {row['ratio']:.4f}" for row in found]
        size = f"{found[0]['weight_bytes'] / 1e6:.2f}"
        lines.append(f"| {width} g{group} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
    parser = text_parser(__doc__)
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
    parser.add_argument("--calibration", type=Path, help="a folder of texts, or a file")
    parser.add_argument("--calibration-tokens", type=int, default=131072)
    parser.add_argument("--calibration-windows", type=int, default=64, help="of the table")
    parser.add_argument("--calibration-length", type=int, default=512, help="of the table")
    parser.add_argument("--work", type=Path, help="keeps what calibration works out")
    parser.add_argument("--methods", default="", help="of the table, comma-separated")
    parser.add_argument("--bits", default="4:32,3:32,2:64", help="of the table, bits:group")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = [name for name in args.recipes.split(",") if name and name != REFERENCE]
    recipes = {name: with_settings(name, args.set) for name in names}
    methods = [name for name in args.methods.split(",") if name]
    sample = {"windows": args.calibration_windows, "length": args.calibration_length}
    recipes |= table_recipes(methods, args.bits.split(","), sample)
    where = Target.parse(args.target, threads=args.threads)
    models = {REFERENCE: gw.optimize(args.model, REFERENCE, target=where)}
    texts = read_texts(args.text, args.files)
    windows = cut(
        models[REFERENCE].tokenizer, models[REFERENCE].program, texts, args.length, args.windows
    )
    print(f"{args.model.name} on {args.target}, windows {named(windows)}", flush=True)
    documents = None
    if args.calibration is None and any(recipe.reads_text for recipe in recipes.values()):
        raise SystemExit("--calibration: a recipe or method calibrates: say on which texts")
    if args.calibration is not None:
        held = frozenset(path.resolve() for path in text_paths(args.text, args.files))
        asked = args.calibration, held, args.calibration_tokens
        documents = calibration_ids(models[REFERENCE], *asked)
    rows: dict[str, dict[str, Any]] = {}
    reference = Remembered(models[REFERENCE])
    scored = {REFERENCE: scores(reference, reference, windows)}
    for name, recipe in {REFERENCE: None, **recipes}.items():
        start = time.perf_counter()
        if recipe is not None:
            learns = documents is not None and recipe.takes_text
            given = {"data": documents, "work": args.work} if learns else {}
            models[name] = gw.optimize(args.model, recipe, target=where, **given)
        made = time.perf_counter() - start
        scored[name] = scored.get(name) or scores(models[name], reference, windows)
        ratio, error = compared(scored[name].nats, scored[REFERENCE].nats)
        report = models[name].report
        rows[name] = {
            "kl": round(statistics.mean(scored[name].kl), 5),
            "agreement": round(statistics.mean(scored[name].agreement), 4),
            "nats": round(statistics.mean(scored[name].nats), 4),
            "ratio": round(ratio, 5),
            "error": round(error, 5),
            "weight_bytes": report.memory().weights if report is not None else None,
            "seconds": round(made, 1),
        }
        if not args.tokens:
            print(f"{name:<24} {json.dumps(rows[name])}", flush=True)
            if recipe is not None:
                del models[name]  # one at a time
    if args.tokens:
        prompts = [[window[: args.length // 2].tolist()] for window in windows[: args.count]]
        systems = {name: decoder(model) for name, model in models.items()}
        runs = take_turns(systems, prompts, args.tokens, args.rounds)
        for name, run in runs.items():
            rows[name]["tokens_per_second"] = round(run.rate, 1)
            rows[name]["over"] = round(run.over(runs[REFERENCE]), 3)
        for name, row in rows.items():
            print(f"{name:<24} {json.dumps(row)}")
    if methods:
        print(table(rows, methods, args.bits.split(",")))
    if args.json:
        head = {"model": args.model.name, "target": args.target, "windows": named(windows)}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
