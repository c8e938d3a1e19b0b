"""The recipe ``auto``: what a model is best run with here, measured on texts like those to come.

Weights first: of those whose perplexity stays within a tolerance the fastest. Then drafts over
them, which leave the text as it is: of drafters that need no training the one that writes the
texts' continuations in the least time, if any does in less than none. What is timed are whole
calls, in turns with what it is compared with, so a drafter that pays on one kind of text and loses
on another is chosen by what it does to all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .data.corpus import SAMPLE, read_corpus
from .data.cost import cost_of, why_not
from .data.knob import READ, TOLERANCE
from .data.prompts import Prompts
from .ir import GraftworkError, InputError
from .ir.support.threads import settle
from .model import Model
from .recipe import Recipe
from .report import Cost

AUTO = "auto"
"""What stands for the recipe in `optimize` and on the command line."""
WEIGHTS = ("int8", "int4")
DRAFTS = ("copyspec", "recycling", "copyspec_recycling", "ngram_mod")
"""Recipes that are tried, in this order: of lossless drafts those that need no training."""
MINUTES = 3.0
PROMPT, TOKENS, TEXTS, ROUNDS = 256, 64, 6, 2
"""Of what is written to tell the speed: tokens of a prompt at most, and new ones; how many texts,
how often."""
WORTH = 1.02
"""What another choice must gain: less is noise."""


class Trial(NamedTuple):
    """speed: new tokens a second over the model's. cost: of weights that are not the model's."""

    recipe: Recipe
    model: Model
    speed: float
    cost: Cost | None = None


def choose(
    plain: Model,
    make: Callable[[Recipe], Model],
    text: Prompts | None = None,
    *,
    tolerance: float | None = None,
    minutes: float | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Model:
    """The best of the recipes that were tried, with a note in its report: why, and what came next.

    plain: the model, with the recipe ``baseline``. make: a recipe's model. text: as `read_corpus`
    has it; None: a bundled one. tolerance: by which share perplexity may rise; default: 0.05.
    minutes: no other recipe is begun after them; default: 3. Errors: `InputError` for a model that
    does not continue texts, and those of `limits`.
    """
    allowed, given = limits(tolerance, minutes)
    if reason := why_not(plain):
        raise InputError(f"recipe {AUTO!r} measures a model beside its variants: {reason}")
    documents = read_corpus(SAMPLE if text is None else text, plain.program)
    prompts = prompts_of(documents, plain.program.info.context)
    end, notes = time.monotonic() + 60 * given, list[str]()
    base, lost = Trial(Recipe.load("baseline"), plain, 1.0), dict[str, float]()

    def better(best: Trial, trial: Trial, gain: float) -> Trial:
        """Of two, of which the other's model is not kept: several take a lot of memory."""
        won, other = (trial, best) if trial.speed > gain * best.speed else (best, trial)
        lost[other.recipe.name] = other.speed
        return won

    def attempts(recipes: Iterable[Recipe]) -> Iterable[tuple[Recipe, Model]]:
        for recipe in recipes:
            if time.monotonic() >= end:
                notes.append(f"{recipe.name} was not tried: {given:g} minutes were over")
                continue
            progress(f"try {recipe.name}")
            try:
                yield recipe, make(recipe)
            except GraftworkError as error:
                notes.append(f"{recipe.name} cannot be made: {error}")

    for recipe, made in attempts(map(Recipe.load, WEIGHTS)):
        cost = cost_of(made, plain, text, sample=READ)
        if cost.ratio + cost.error > 1 + allowed:
            said = f"{cost.ratio:.3f} +- {cost.error:.3f} of the model's perplexity"
            notes.append(f"{recipe.name} has {said}, and {1 + allowed:g} is tolerated")
            continue
        base = better(base, Trial(recipe, made, pace(made, plain, prompts), cost), 1.0)
    best = base
    for recipe, made in attempts(joined(Recipe.load(name), base.recipe) for name in DRAFTS):
        speed = base.speed * pace(made, base.model, prompts)
        trial = Trial(recipe, made, speed, base.cost)
        best = better(best, trial, WORTH if best is base else 1.0)
    others = sorted(lost.items(), key=lambda item: -item[1])
    came = ", ".join(f"{name} {speed:.2f}" for name, speed in others) or "nothing"
    where = f"{len(prompts)} texts x {TOKENS} tokens"
    best.model.tell(
        best.cost and best.cost.model_copy(update={"speed": best.speed}),
        f"{AUTO} took {best.recipe.name}: {best.speed:.2f} times the model's speed on {where}; "
        f"then came {came}",
    )
    for note in notes:
        best.model.tell(note=note)
    best.model.forget()
    return best.model


def limits(tolerance: float | None, minutes: float | None) -> tuple[float, float]:
    """Both, or their defaults. Errors: `InputError` for numbers that are none."""
    allowed = TOLERANCE if tolerance is None else tolerance
    if isinstance(allowed, bool) or not 0 < allowed < 100:
        raise InputError(f"tolerance={tolerance!r}: expected a share above 0, such as 0.05")
    given = MINUTES if minutes is None else minutes
    if isinstance(given, bool) or not 0 < given < 10_000:
        raise InputError(f"minutes={minutes!r}: expected minutes, such as 3")
    return allowed, given


def joined(recipe: Recipe, weights: Recipe) -> Recipe:
    """A recipe with the passes of another one that it lacks.

    >>> joined(Recipe.load("copyspec"), Recipe.load("int8")).name
    'copyspec+int8'
    """
    known = {use.name for use in recipe.passes}
    more = [use for use in weights.passes if use.name not in known]
    if not more:
        return recipe
    both = f"{recipe.title}, over {weights.title[0].lower()}{weights.title[1:]}"
    passes, name = (*recipe.passes, *more), f"{recipe.name}+{weights.name}"
    return replace(recipe, name=name, title=both, passes=passes)


def prompts_of(documents: Sequence[Sequence[int]], context: int) -> list[list[int]]:
    """Beginnings of texts, evenly among them: up to half of each. Of fewer, longer texts parts.
    context: tokens that a text may have."""
    size = min(2 * PROMPT, context)
    parts = [
        list(document[start : start + size])
        for document in documents
        for start in range(0, len(document), size)
    ]
    parts = [part for part in parts if len(part) >= 2] or parts
    step = max(1, len(parts) // TEXTS)
    return [part[: (len(part) + 1) // 2] for part in parts[::step]][:TEXTS]


def pace(made: Model, other: Model, prompts: Sequence[Sequence[int]]) -> float:
    """Tokens a second of whole calls over another model's, in turns: the median of some rounds.
    What was learned from one text is forgotten before the next."""
    most = made.program.info.context - max(map(len, prompts))
    asked: dict[str, Any] = {"max_new_tokens": min(TOKENS, most), "do_sample": False}
    asked |= {"eos_token_id": [], "pad_token_id": 0}

    def seconds(model: Model, prompt: Sequence[int]) -> float:
        model.forget()
        settle()
        start = time.perf_counter()
        model.generate([list(prompt)], **asked)
        return time.perf_counter() - start

    for model in (made, other):  # the first one compiles and touches memory
        seconds(model, prompts[0])
    rates = []
    for _ in range(ROUNDS):
        mine = theirs = 0.0
        for prompt in prompts:
            theirs += seconds(other, prompt)
            mine += seconds(made, prompt)
        rates.append(theirs / mine)
    return statistics.median(rates)
