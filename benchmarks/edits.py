"""What an edited prompt costs where the rows behind the edit are kept, and what that does to texts.

    python benchmarks/edits.py MODEL --text FOLDER [--files FILES.json] [--recipe pie]
        [--length 1024] [--edits 24] [--tokens 12] [--after 64] [--threads 1]
        [--target onnxruntime:cpu:float32] [--json F]

A window of `length` tokens of a text is what was there before; from a third of it on, `tokens`
tokens are taken out, put in (of another text) or replaced by them, in turns, and the edited window
is asked for its next token. Reported are the medians of the prefill seconds, with the rows of the
text before and after `forget`, the tokens fed, and, over the `after` tokens that follow the window
in the text: perplexity over that of the edited window fed whole, how often the likeliest token is
the same, and, beside it, the perplexity where the rows behind the edit are kept and not turned.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from quality import cut, read_texts
from systems import optimized_model, settle, text_parser

import graftwork as gw
from graftwork.ir import Program
from graftwork.ir.plan import KeepEdited
from graftwork.runtime.cache.conversations import Conversations


def ask(model: gw.Model, text: list[int]) -> Any:
    """The token that follows a text."""
    settle()
    return model.generate(
        torch.tensor([text]),
        max_new_tokens=1,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
        return_dict_in_generate=True,
    )


def follows(model: gw.Model, rows: int, tokens: list[int]) -> torch.Tensor:
    """Logits f32[N,V] behind what lies in the buffers, of which `rows` rows count, for each of
    these tokens."""
    executable, width = model.executable, len(tokens)
    steps = torch.arange(width)[None]
    fed = {"tokens": torch.tensor([tokens]), "positions": steps + rows, "select": steps}
    fed |= {"past": torch.tensor([rows]), "certain": torch.tensor([width])}
    own = {str(node.target) for node in model.program.step.inputs}
    executable.reserve(rows + width)
    given = {name: value for name, value in fed.items() if name in own}
    return executable.run(model.program.plan.step.plain, given, ("logits",))["logits"][0].clone()


def edited(window: list[int], other: list[int], kind: str, tokens: int) -> list[int]:
    """The window with something taken out, put in or replaced."""
    place = len(window) // 3
    gone = 0 if kind == "put in" else tokens
    put = [] if kind == "taken out" else other[:tokens]
    return window[:place] + put + window[place + gone :]


def unturned(program: Program) -> Program:
    """The same, but that keys stay as they were: what turning them is compared with."""
    assert isinstance(program.plan.cache, KeepEdited)
    fn = program.function(program.plan.cache.function).copy()
    fn.set_outputs({name: fn.input(name) for name in fn.outputs})
    return program.with_function(fn)


def losses_of(logits: torch.Tensor, tokens: list[int]) -> float:
    """Mean nats of the tokens, each by the logits before it."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item()


def main() -> None:
    parser = text_parser(__doc__)
    parser.add_argument("--recipe", default="pie")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--edits", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--after", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--target", default="onnxruntime:cpu:float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = optimized_model(args.model, args.recipe, args.target, args.threads)
    still = gw.Model(unturned(model.program), model.target, model.recipe)
    texts = read_texts(args.text, args.files)
    windows = cut(
        model.tokenizer, model.program, texts, args.length + args.after, args.edits
    ).tolist()
    kinds = ("taken out", "put in", "replaced")
    seconds: dict[str, list[float]] = {"kept": [], "fed again": []}
    nats: dict[str, list[float]] = {"kept": [], "kept unturned": [], "fed again": []}
    same, fed = [], []
    for index, whole in enumerate(windows):
        window, after = whole[: args.length], whole[args.length :]
        other = windows[(index + 1) % len(windows)]
        new = edited(window, other, kinds[index % 3], args.tokens)
        logits = {}
        for name, one in (("kept", model), ("kept unturned", still), ("fed again", model)):
            one.forget()
            if name != "fed again":
                ask(one, window)
            result = ask(one, new)
            if name in seconds:
                seconds[name].append(result.stats.prefill_seconds)
            if name == "kept":
                fed.append(len(new) - result.stats.reused_tokens)
            logits[name] = follows(one, len(new), after)
            nats[name].append(losses_of(logits[name], after))
            Conversations.of(one.executable).forget()
        best = [logits[name].argmax(-1) for name in ("kept", "fed again")]
        same.append((best[0] == best[1]).double().mean().item())
    mean = {name: statistics.mean(found) for name, found in nats.items()}
    apart = [a - b for a, b in zip(nats["kept"], nats["fed again"], strict=True)]
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    report = {"model": args.model.name, "target": args.target, "edits": len(windows)}
    report |= {"length": args.length, "fed": statistics.median(fed), "prefill_seconds": medians}
    report |= {"speed": medians["fed again"] / medians["kept"]}
    report |= {
        "perplexity": math.exp(mean["fed again"]),
        "ratio": math.exp(mean["kept"] - mean["fed again"]),
        "error": statistics.stdev(apart) / math.sqrt(len(apart)),
        "ratio_unturned": math.exp(mean["kept unturned"] - mean["fed again"]),
        "agreement": statistics.mean(same),
    }
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
