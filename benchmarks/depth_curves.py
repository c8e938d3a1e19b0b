"""What leaving layers out costs the text: perplexity and agreement over the layers that are run.

    python benchmarks/depth_curves.py MODEL --text FOLDER [--files FILES.json] [--small FOLDER]
        [--methods "d3;calm, margin"] [--windows 8] [--length 192] [--prompt 64] [--steps 150]
        [--set free.depth_deferred.exit=10] [--values "[0.2, 0.1]"] [--target T] [--json F]
        [--svg F]

Each method is run over its knob, by the values in METHODS or those given. Windows of held-out text
are read token by token, as in decoding: the first `prompt` tokens as a prompt, and then whatever
the model says, the text goes on as it is.
So every token is predicted under the rows that the method itself left behind, and each method by
the same text. Perplexity is over that of the whole model; agreement is how often the likeliest
token is the whole model's. The share of layers is that of the tokens behind the prompt; what makes
up for rows later (free, calm) is not counted. The text is cut into windows as in quality.py.
Probes, heads and routers are taught on files that are not scored, heads and routers by `steps`
steps. small: the checkpoint that writes where entropy is low; its method is left out without one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from cycler import cycler
from quality import calibration_ids, cut, read_texts, text_paths
from systems import optimized_model, text_parser, with_settings

import graftwork as gw
from graftwork.backends import Target
from graftwork.recipe import Recipe
from graftwork.runtime.asking.options import BEST
from graftwork.runtime.asking.request import read_request
from graftwork.runtime.generation import forget
from graftwork.runtime.loop import run
from graftwork.runtime.rounds import Decoding
from graftwork.runtime.speculate.sampling import StepToVerify
from graftwork.runtime.speculate.verifiers.base import Verdict, Verifier

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Knobs = tuple[str, str, tuple[Any, ...]]
"""A recipe, the setting that is turned, and its values."""

PROBE = "depth_confident.measure=probe"
"""The measure that is fitted on text."""

METHODS: dict[str, Knobs] = {
    "skip_layers": ("skip_layers", "skip_layers.layers", ([-2], [-3, -2], [-4, -3, -2])),
    "unified_skipping": ("unified_skipping", "skip_layers.speedup", (1.14, 1.33, 1.6, 2.0)),
    "skipdecode": ("skipdecode", "depth_linear.least", (6, 5, 4, 3, 2)),
    "d3": ("d3", "depth_decay.alpha", (0.999, 0.997, 0.995, 0.99)),
    "ffn_skipllm": ("ffn_skipllm", "depth_mlp.similarity", (0.999, 0.995, 0.99, 0.985, 0.98)),
    "free": ("free", "depth_deferred.threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
    "free, learnt": ("free", "depth_deferred.posterior", (0.97, 0.9, 0.8, 0.6, 0.4)),
    "calm, margin": ("calm", "depth_confident.threshold", (0.95, 0.8, 0.6, 0.4, 0.2)),
    "calm, saturation": ("calm", "depth_confident.threshold", (0.995, 0.99, 0.985, 0.98, 0.97)),
    "calm, probe": ("calm", "depth_confident.threshold", (0.9, 0.75, 0.6, 0.45, 0.3)),
    "self_supervised_exits": (
        "self_supervised_exits",
        "depth_heads.threshold",
        (0.95, 0.8, 0.6, 0.4, 0.2),
    ),
    "mixture_of_depths": (
        "mixture_of_depths",
        "depth_mixture.threshold",
        (0.2, 0.35, 0.5, 0.65, 0.8),
    ),
    "entropy_adaptive": ("entropy_adaptive", "depth_entropy.threshold", (1.0, 1.5, 2.0, 2.5, 3.0)),
}
MORE: dict[str, tuple[str, ...]] = {
    "calm, saturation": ("depth_confident.measure=saturation",),
    "calm, probe": (PROBE,),
    "ffn_skipllm": ("depth_mlp.first=1", "depth_mlp.last=1"),
}
"""Settings that a method has besides."""

TAUGHT = {"self_supervised_exits": "depth_heads", "mixture_of_depths": "depth_mixture"}
"""Methods whose weights are taught before they are run, and the pass that has them."""

GUEST = "entropy_adaptive"
"""The method that takes a smaller model."""

LEARNT = 1 << 14
"""Tokens of other files that probes, heads and routers learn from, at least."""


class Reader(Verifier):
    """Lets a text go on as it is. losses: nats of its tokens; best: what was likeliest."""

    def __init__(self, inner: Verifier, tokens: Sequence[int]) -> None:
        self.fetch, self.tokens = ("logits",), tokens
        self.losses: list[float] = []
        self.best: list[int] = []
        self.scorer = inner.scorer

    def verify(self, step: StepToVerify) -> list[Verdict]:
        """One token of the one text there is."""
        token = self.tokens[len(step.texts[0].tokens)]
        scores = step.outputs["logits"][0, 0].float().log_softmax(-1)
        self.losses.append(-float(scores[token]))
        self.best.append(int(scores.argmax()))
        return [Verdict((), [token])]


def read(
    executable: Any, window: Sequence[int], prompt: int
) -> tuple[list[float], list[int], float]:
    """Nats and likeliest tokens behind the prompt, and layers a token."""
    forget(executable)
    ids = torch.tensor([window[:prompt]])
    asked = {**BEST, "max_new_tokens": len(window) - prompt, "eos_token_id": None}
    asked["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad(), executable.turn:
        decoding = Decoding(executable, read_request(ids, asked, executable.program))
        reader = decoding.verifier = Reader(decoding.verifier, window)
        decoding.fetch = reader.fetch
        run(decoding)
    return reader.losses, reader.best, decoding.stats.layers


def measured(
    args: argparse.Namespace,
    recipe: Recipe,
    windows: Sequence[Sequence[int]],
    documents: Sequence[Sequence[int]] = (),
) -> tuple[list[float], list[int], float]:
    """All windows, one after the other. documents: what a recipe that reads text learns from."""
    given: dict[str, Any] = {"data": documents} if recipe.reads_text else {}
    target = Target.parse(args.target, threads=args.threads)
    model = gw.optimize(args.model, recipe, target=target, **given)
    losses: list[float] = []
    best: list[int] = []
    layers = []
    for window in windows:
        nats, said, ran = read(model.executable, window, args.prompt)
        losses += nats
        best += said
        layers.append(ran)
    return losses, best, sum(layers) / len(layers)


def settings(
    args: argparse.Namespace, name: str, documents: Sequence[Sequence[int]], folder: Path
) -> list[str]:
    """What a method is run with besides its knob; what it must know is taught first."""
    if name == GUEST:
        return [f"depth_entropy.model={args.small}"]
    if name not in TAUGHT:
        return list(MORE.get(name, ()))
    target = Target.parse(args.target, threads=args.threads)
    model = gw.optimize(args.model, METHODS[name][0], target=target)
    options = {"steps": args.steps, "window": args.length, "own": 0.25}
    gw.fit(model, documents, out=folder / name, **options)
    return [f"{TAUGHT[name]}.weights={folder / name}"]


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line a method, perplexity on the left and agreement on the right."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for axis, key, label in zip(
        axes,
        ("perplexity", "agreement"),
        ("perplexity over the whole model's", "likeliest token the whole model's"),
        strict=True,
    ):
        axis.set_prop_cycle(cycler(linestyle=["-", "--"]) * plt.rcParams["axes.prop_cycle"])
        for name in dict.fromkeys(row["method"] for row in rows):
            points = sorted((r["share"], r[key]) for r in rows if r["method"] == name)
            axis.plot(*zip(*points, (1.0, 1.0), strict=True), marker="o", markersize=3, label=name)
        axis.set(xlabel="share of the layers that a token runs through", ylabel=label)
        axis.grid(visible=True, linewidth=0.3)
    axes[0].set_yscale("log")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("--small", type=Path, help="a smaller model with the same tokenizer")
    parser.add_argument("--methods", default=";".join(METHODS), help="by ';', of those above")
    parser.add_argument("--steps", type=int, default=150, help="of teaching heads and routers")
    parser.add_argument("--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE")
    parser.add_argument("--values", type=json.loads, help="a list in JSON")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = args.methods.split(";")
    if unknown := sorted(set(names) - set(METHODS)):
        parser.error(f"no method {unknown[0]!r}; there are {'; '.join(METHODS)}")
    if GUEST in names and args.small is None:
        print(f"{GUEST} is left out: it takes a smaller model, --small", file=sys.stderr)
        names.remove(GUEST)
    if not 0 < args.prompt < args.length:
        parser.error(
            f"--prompt {args.prompt}: expected 1 to {args.length - 1} of a window's tokens"
        )
    whole = optimized_model(args.model, Recipe.load("baseline"), args.target, args.threads)
    windows = cut(
        whole.tokenizer, whole.program, read_texts(args.text, args.files), args.length, args.windows
    ).tolist()
    nats, said, total = measured(args, Recipe.load("baseline"), windows)
    print(
        f"{args.model.name}: perplexity {math.exp(sum(nats) / len(nats)):.2f}, {len(nats)} tokens"
    )
    documents: list[list[int]] = []
    if any(name in TAUGHT or PROBE in MORE.get(name, ()) for name in names):
        # Files that are scored are none to learn from.
        held = frozenset(path.resolve() for path in text_paths(args.text, args.files))
        documents = calibration_ids(whole, args.text, held, LEARNT)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            recipe, knob, usual = METHODS[name]
            values = usual if args.values is None else args.values
            more = settings(args, name, documents, Path(folder))
            for value in values:
                given = with_settings(recipe, args.set)
                chosen = given.with_options([f"{knob}={value}", *more])
                losses, best, layers = measured(args, chosen, windows, documents)
                worse = (sum(losses) - sum(nats)) / len(nats)
                alike = sum(a == b for a, b in zip(best, said, strict=True)) / len(said)
                row = {"method": name, "knob": knob, "value": value, "share": layers / total}
                row |= {"perplexity": math.exp(worse), "agreement": alike}
                rows.append(row)
                print(
                    f"{name:<18} {knob}={value}: {layers / total:.3f} of the layers, perplexity "
                    f"{math.exp(worse):.3f}, agreement {alike:.3f}",
                    file=sys.stderr,
                )
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))
    if args.svg:
        draw(rows, args.svg)


if __name__ == "__main__":
    main()
