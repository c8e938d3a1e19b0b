"""Which layers a model misses least, by evidence: a set for the recipe skip_layers under a budget.

    python benchmarks/layer_importance.py MODEL --text FOLDER [--files FILES.json] [--budget 2]
        [--by loss|cosine] [--parts layers|sublayers] [--windows 8] [--length 256] [--json F]

For every part (a layer, or with --parts sublayers its attention and its MLP) it shows the mean
cosine of the state before it and behind it, over all tokens (1: the part changes nothing), and how
many nats a token the text costs more without it, the others being there. Then it chooses `budget`
parts: by loss one after the other, each time the part that is missed least beside those that are
gone already; by cosine those with the largest at once. What is printed last is what to set, and
what the text costs then. The text is cut into windows as in quality.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from quality import cut, read_texts
from systems import text_parser

import graftwork as gw
from graftwork.ir import Program
from graftwork.ir.support.tokenizer import read_tokenizer
from graftwork.optimizing import trace
from graftwork.passes.depth.importance import Part, cosines, loss, missed_least
from graftwork.passes.depth.skip_layers import SkipLayers


def canonical(source: Path) -> Program:
    """The model before it has a cache."""
    return trace(source, gw.Recipe.load("baseline"), target="eager", after="canonicalize")


def options(gone: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """The parts as options of skip_layers; a layer that loses both its parts goes whole."""
    sets: dict[str, set[int]] = {"layers": set(), "attention": set(), "mlp": set()}
    for name, layer in gone:
        sets[name].add(layer)
    whole = sets["attention"] & sets["mlp"]
    sets["layers"] |= whole
    given = {"layers": sets["layers"]}
    given |= {name: sets[name] - whole for name in ("attention", "mlp")}
    return {name: tuple(sorted(layers)) for name, layers in given.items() if layers}


def without(program: Program, gone: Sequence[Part]) -> Program:
    return SkipLayers(**options(gone)).run(program).program if gone else program


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("--budget", type=int, default=2, help="parts to leave out")
    parser.add_argument("--by", choices=("loss", "cosine"), default="loss")
    parser.add_argument("--parts", choices=("layers", "sublayers"), default="layers")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    program = canonical(args.model)
    tokenizer = read_tokenizer(program.assets["tokenizer.json"])
    texts = read_texts(args.text, args.files)
    windows = cut(tokenizer, program, texts, args.length, args.windows)
    alike = cosines(program, windows, args.parts == "sublayers")
    if not 0 < args.budget < len(alike):
        raise SystemExit(f"--budget {args.budget}: expected 1 to {len(alike) - 1} parts")
    whole = loss(program, windows)
    print(f"{args.model.name}: {whole:.4f} nats a token of {len(windows)} windows")
    rows: dict[str, Any] = {}
    for part, cosine in alike.items():
        more = loss(without(program, [part]), windows) - whole
        rows[f"{part[0]} {part[1]}"] = {"cosine": round(cosine, 4), "nats": round(more, 4)}
        print(f"{part[0]:<10} {part[1]:>3}  cosine {cosine:.4f}  without it {more:+.4f} nats")
    if args.by == "cosine":
        gone = sorted(alike, key=lambda part: -alike[part])[: args.budget]
    else:
        costs = lambda some: loss(without(program, some), windows)  # noqa: E731
        gone = missed_least(costs, list(alike), args.budget)
    then = loss(without(program, gone), windows)
    chosen = {name: list(layers) for name, layers in options(gone).items()}
    said = " ".join(f"--set skip_layers.{name}={layers}" for name, layers in chosen.items())
    print(f"{said}   ({then - whole:+.4f} nats)")
    if args.json:
        report = {"nats": round(whole, 4), "parts": rows, "chosen": chosen, "then": round(then, 4)}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
