"""Prompts whose rows are predicted: how well texts go on from them, and how soon they begin.

    python benchmarks/predicted_prompts.py MODEL --text FOLDER --calibration FOLDER
        [--files FILES.json] [--layers 4,6] [--sources 1] [--length 512] [--windows 12]
        [--target onnxruntime:cpu:float32] [--rounds 5] [--threads 1]

The first half of a window is a prompt, and the rest is scored token by token behind it: `ratio` of
the perplexity over that behind a prompt that ran through all layers, and its standard error (eager,
float32). `first` is the time from the call to the first new token over that of ``baseline``, for
whole windows as prompts on `target`, in turns: the median over rounds of their ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from quality import calibration_ids, compared, cut, read_texts, text_paths
from systems import optimized_model, text_parser

import graftwork as gw
from graftwork.backends import Target
from graftwork.ir.plan.inputs import chain_inputs
from graftwork.recipe import Recipe

CALIBRATION = 2**18
"""Tokens of text that maps are learned from at most."""


def behind(model: gw.Model, window: torch.Tensor) -> float:
    """Mean nats a token of a window's second half, the first one being a prompt."""
    executable, half = model.executable, len(window) // 2
    ahead = model.program.plan.step.ahead or model.program.step.name
    executable.begin(1, len(window))
    executable.reserve(len(window))
    for name, start, stop in (
        (ahead, 0, half - 1),
        (model.program.step.name, half - 1, len(window) - 1),
    ):
        given = chain_inputs(window[None, start:stop], start)
        wanted = {n: t for n, t in given.items() if model.program.function(name).has_input(n)}
        fetch = ("logits",) if start else ()
        outputs = executable.run(name, wanted, fetch)
    logits = outputs["logits"][0].float()
    return torch.nn.functional.cross_entropy(logits, window[half:]).item()


def seconds(model: gw.Model, window: torch.Tensor) -> float:
    """From a call to its first new token."""
    model.forget()
    begun = time.perf_counter()
    model.generate(window[None], max_new_tokens=1, do_sample=False, eos_token_id=[])
    return time.perf_counter() - begun


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--layers", default="4,6")
    parser.add_argument("--sources", default="1")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--rounds", type=int, default=5, help="0: no times")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    eager, target = "eager:cpu:float32", Target.parse(args.target, threads=args.threads)
    whole = optimized_model(args.model, "baseline", eager, args.threads)
    windows = cut(
        whole.tokenizer, whole.program, read_texts(args.text, args.files), args.length, args.windows
    )
    reference = [behind(whole, window) for window in windows]
    held = frozenset(path.resolve() for path in text_paths(args.text, args.files))
    data = calibration_ids(whole, args.calibration, held, CALIBRATION)
    plain = gw.optimize(args.model, "baseline", target=target) if args.rounds else None
    for layers in args.layers.split(","):
        for sources in args.sources.split(","):
            options = [f"predict_cache.layers={layers}", f"predict_cache.sources={sources}"]
            recipe = Recipe.load("kv_prediction").with_options(options)
            model = gw.optimize(args.model, recipe, target=eager, data=data)
            ratio, error = compared([behind(model, window) for window in windows], reference)
            row = {"layers": int(layers), "sources": int(sources)}
            row |= {"ratio": round(ratio, 4), "error": round(error, 4)}
            if plain is not None:
                fast = gw.optimize(args.model, recipe, target=target, data=data)
                for model in (plain, fast):  # compiled and warm
                    seconds(model, windows[0])
                taken = [
                    [seconds(model, windows[n % len(windows)]) for model in (plain, fast)]
                    for n in range(args.rounds)
                ]
                row["first"] = round(statistics.median(b / a for a, b in taken), 3)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
