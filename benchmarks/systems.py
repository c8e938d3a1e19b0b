"""Systems that continue prompts greedily: what benchmarks measure, and how they take turns.

A system takes a batch of prompts and a number of new tokens. Only decoding is timed, not the
prompts' step: a rate is new tokens after the first, divided by the time they took. Systems take
turns, batch by batch, so that what disturbs the machine disturbs all alike, each time in another
order, and each when the threads of the one before, which spin for a while after their work, have
come to rest. A ratio compares rates of the same round, and is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import graftwork as gw
from graftwork.backends import Target
from graftwork.choosing import joined
from graftwork.draft_option import with_draft
from graftwork.ir.support import threads
from graftwork.recipe import Recipe

Batch = Sequence[Sequence[int]]

Result = tuple[list[list[int]], float, dict[str, float]]
"""New token ids of each prompt, seconds for all but the first ones, further figures, among them
``first_ms``: milliseconds up to the first new token."""

System = Callable[[Batch, int], Result]

PAUSES = 250
"""How often threads are watched at most, until they are at rest."""


def padded(prompts: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and their attention mask i64[B,S], padded on the left."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def transformers_eager(folder: Path, **options: Any) -> System:
    """transformers' greedy generate in float32; the prompts' time is measured and taken off.

    options: for `generate`, such as ``prompt_lookup_num_tokens=10`` (one prompt at a time only).
    """
    from graftwork.frontends.huggingface.model import load_model

    model = load_model(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def once(prompts: Batch, count: int) -> tuple[list[list[int]], float]:
        ids, mask = padded(prompts)
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return out[:, ids.shape[1] :].tolist(), time.perf_counter() - start

    return timed_whole(once)


def timed_whole(once: Callable[[Batch, int], tuple[list[list[int]], float]]) -> System:
    """A system that can only be asked for so many new tokens: one new token is the prompt's time.

    once: new tokens of each prompt, and the seconds of all of it.
    """

    def run(prompts: Batch, count: int) -> Result:
        _, first = once(prompts, 1)
        new, seconds = once(prompts, count)
        return new, seconds - first, {"first_ms": 1e3 * first}

    return run


def text_parser(says: str | None) -> argparse.ArgumentParser:
    """A parser for what reads a model and held-out text. says: the benchmark's documentation."""
    parser = argparse.ArgumentParser(
        description=says, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--files", type=Path)
    return parser


def add_arguments(parser: argparse.ArgumentParser, targets: str) -> None:
    """What is run on which prompts, for scripts that compare recipes on several targets."""
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, help="random ids without")
    parser.add_argument("--recipes", default="copyspec,recycling")
    parser.add_argument("--targets", default=targets)
    parser.add_argument("--count", type=int, default=24, help="prompts")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt at most")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens a prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--set", action="append", default=[], metavar="RECIPE.PASS.OPTION=VALUE", help="repeatable"
    )


BITS = {"float32": "baseline", "int8": "int8", "int4": "int4"}
"""Recipes whose passes that `baseline` lacks a drafting recipe is given, by what weights have."""


def over(name: str, bits: str, settings: Sequence[str]) -> Recipe:
    """A recipe's passes, and those that leave weights so many bits."""
    return joined(with_settings(name, settings), Recipe.load(BITS[bits]))


def with_settings(name: str, settings: Sequence[str]) -> Recipe:
    """A recipe with those of the ``recipe.pass.option=value`` settings that name it."""
    mine = [rest for owner, _, rest in (s.partition(".") for s in settings) if owner == name]
    return Recipe.load(name).with_options(mine)


def with_guests(recipe: Recipe, corpus: Path | None, draft: Path | None) -> Recipe:
    """A recipe with the files that it asks for: a corpus to draft from, a smaller model."""
    if corpus is not None and "a corpus file" in recipe.brought:
        recipe = recipe.with_options([f"draft_corpus.path={corpus}"])
    if draft is not None and any("" in step.pass_.models for step in recipe.steps):
        recipe = with_draft(recipe, draft)
    return recipe


def optimized_model(
    folder: Path, recipe: Any, target: str, threads: int, data: Path | None = None
) -> gw.Model:
    """One of our recipes on one target. data: text, for passes that learn from some."""
    return gw.optimize(folder, recipe, target=Target.parse(target, threads=threads), data=data)


def optimized(
    folder: Path, recipe: Any, target: str, threads: int, data: Path | None = None
) -> System:
    """One of our recipes on one target, as what continues prompts."""
    return running(optimized_model(folder, recipe, target, threads, data))


def steady(model: gw.Model) -> gw.Model:
    """A model whose drafts are whole, whatever steps take."""
    plan = model.program.plan
    return replace(
        model, program=model.program.replace(plan=replace(plan, length=plan.length.steady))
    )


def running(model: gw.Model) -> System:
    """A model as what continues prompts."""

    def run(prompts: Batch, count: int) -> Result:
        ids, mask = padded(prompts)
        model.forget(learnt=False)
        result = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        stats = result.stats
        figures = {
            "accepted_per_step": float(stats.accepted_per_step),
            "host_us_per_step": 1e6 * float(stats.host_overhead),
            "first_ms": 1e3 * float(stats.prefill_seconds),
        }
        return result.sequences[:, ids.shape[1] :].tolist(), stats.decode_seconds, figures

    return run


def read_prompts(
    path: Path | None, count: int, length: int, vocab: int, name: str = ""
) -> list[list[int]]:
    """Prompts from a file, cut to `length` tokens, or random ones. A line has ``ids``, or those of
    a model under its name."""
    if path is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1, vocab, (count, length), generator=generator).tolist()
    lines = path.read_text().splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    return [(row["ids"] if "ids" in row else row[name])[:length] for row in rows]


def settle() -> None:
    """See `graftwork.ir.support.threads.settle`. Errors: `TimeoutError` if threads never rest."""
    if not threads.settle(PAUSES):
        raise TimeoutError(f"threads are still busy after {PAUSES} looks at them")


@dataclass
class Runs:
    """What a system did. rates: tokens a second of each round. texts: of the last round, a prompt
    each. figures: of every batch in every round, by name."""

    rates: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rates)

    def over(self, other: Runs) -> float:
        """How many times as fast as `other`: the median of what the rounds say."""
        return statistics.median(a / b for a, b in zip(self.rates, other.rates, strict=True))


def take_turns(
    systems: Mapping[str, System], batches: Iterable[Batch], count: int, rounds: int
) -> dict[str, Runs]:
    """Every system continues every batch by `count` tokens, in each round, in a drawn order.

    They warm up on the first batch's prompts read backwards, so that a drafter that remembers texts
    has not met the ones that are measured.
    """
    batches = list(batches)
    runs = {name: Runs() for name in systems}
    order = random.Random(0)
    for name, run in systems.items():
        run([prompt[::-1] for prompt in batches[0]], count)
        print(f"ready: {name}", file=sys.stderr)
    for _ in range(rounds):
        spent = dict.fromkeys(systems, 0.0)
        for name in systems:
            runs[name].texts = []
        for batch in batches:
            for name in order.sample(list(systems), len(systems)):
                settle()
                new, seconds, figures = systems[name](batch, count)
                runs[name].texts += new
                spent[name] += seconds
                for key, value in figures.items():
                    runs[name].figures.setdefault(key, []).append(value)
        for name, kept in runs.items():
            kept.rates.append(sum(len(text) - 1 for text in kept.texts) / spent[name])
    return runs
