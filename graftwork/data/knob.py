"""A recipe's knob, turned as far as a text allows.

Which layers, thresholds or budgets keep a model's text differs from model to model: what costs a
model that was trained for it nothing makes another write garbage. So recipes that leave work out
say which option decides how much, and `turned` takes the most that costs a text no more than is
tolerated, or refuses and says what the least would cost. It refuses, too, where that much saves no
time: asking whether layers may be left out has a price, and values that cost a text less save less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, Unpack

from ..ir import InputError, PassError
from ..ir.support.threads import settle
from ..passes.engine.evidence import TextSample
from ..recipe import Recipe
from ..report import Choice, Cost
from ..runtime.asking.keywords import GenerateOptions
from .corpus import SAMPLE, read_corpus
from .cost import AT_ONCE, Predicting, cost_of
from .prompts import Prompts


class Decoding(Predicting, Protocol):
    """What is timed: a model of a recipe that writes texts."""

    @property
    def recipe(self) -> Mapping[str, Any]: ...
    @property
    def target(self) -> object: ...
    def forget(self) -> None: ...
    def generate(
        self, input_ids: Sequence[Sequence[int]], /, **options: Unpack[GenerateOptions]
    ) -> Any: ...


M = TypeVar("M", bound=Decoding)


class NoValueServes(InputError):
    """No value of a knob keeps the text and saves time."""


TOLERANCE = 0.05
"""How much perplexity may rise, as a share, unless a call says otherwise."""
READ = TextSample(4, 256)
"""What each value is measured on, """
SINGLY = TextSample(1, 320)
"""and where a text is run token by token, because each may stop at another layer."""
SHORTEST = 4 * AT_ONCE
"""Tokens of a text that may decide, at least: what it costs has a standard error by its parts."""
PROMPT, TOKENS, ROUNDS = 64, 24, 3
"""Of the text that is written to tell the speed, and how often."""
READING = 512
"""Tokens of a prompt that is read to tell the speed, where prompts alone run otherwise."""
SLOWER = 0.97
"""A speed over the model's below which a recipe is slower: less is noise."""


def turned(
    recipe: Recipe,
    make: Callable[[Recipe], M],
    plain: Decoding,
    text: Prompts | None,
    tolerance: float,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[M, Choice]:
    """The model of the first value of the recipe's knob whose perplexity on a text, with its
    standard error, is at most 1 + tolerance of the model's. Values behind one that is good enough
    are taken to be so as well, so few are tried. Returns what was chosen, too.

    text: None: the bundled one. Errors: `NoValueServes` if none is, or if it decodes more slowly
    than the model; `InputError` for a text of less than `SHORTEST` tokens; those of the passes
    where the last value cannot be made.
    """
    knob = recipe.knob
    assert knob is not None
    if text is not None:
        tokens = sum(map(len, read_corpus(text, plain.program)))
        if tokens < SHORTEST:
            raise InputError(
                f"data: {tokens} tokens are too few to decide on {knob.option}: give {SHORTEST} at "
                f"least, of texts like those to be written, or leave data out for a bundled text"
            )
    low, high = 0, len(knob.values)
    found: tuple[M, Any, Cost] | None = None
    least: tuple[Any, Cost] | None = None
    while low < high:
        middle = (low + high) // 2
        value = knob.values[middle]
        progress(f"try {knob.option}={value}")
        try:
            made = make(recipe.turned(value))
        except PassError:
            if middle == len(knob.values) - 1:
                raise
            low = middle + 1  # fewer layers than the model can do with
            continue
        read = SINGLY if made.program.plan.depth.acts else READ
        cost = cost_of(made, plain, text, sample=read)
        if cost.ratio + cost.error <= 1 + tolerance:
            found, high = (made, value, cost), middle
        else:
            low, least = middle + 1, (value, cost)
    if found is None:
        assert least is not None
        value, cost = least
        raise NoValueServes(
            f"recipe {recipe.name!r} leaves out more than this model can do without: on "
            f"{cost.text}, {knob.option}={value}, the least of its values, has "
            f"{_said(cost)} of the model's perplexity, and {1 + tolerance:g} is tolerated, the "
            f"error included. "
            f"{_remedies(recipe, cost)}"
        )
    made, value, cost = found
    speed = pace_of(made, plain)
    if speed < SLOWER:  # once more: a refusal must not be noise
        speed = max(speed, pace_of(made, plain, 2 * ROUNDS))
    if speed < SLOWER:
        more = "no value of it costs this text more"
        if least is not None:
            more = f"{knob.option}={least[0]} already has {_said(least[1])}"
        raise NoValueServes(
            f"recipe {recipe.name!r} makes this model slower: {knob.option}={value}, which leaves "
            f"out the most of what {cost.text} can do without ({_said(cost)} of the model's "
            f"perplexity, {1 + tolerance:g} is tolerated), {_does(made)} at {speed:.2f} times the "
            f"model's own speed, and {more}. {_remedies(recipe, least and least[1])}"
        )
    note = f"{knob.option}={value} keeps {tolerance:g}"
    return made, Choice(value=value, cost=cost.model_copy(update={"speed": speed}), note=note)


def _said(cost: Cost) -> str:
    return f"{cost.ratio:.3f} +- {cost.error:.3f}"


def _remedies(recipe: Recipe, cost: Cost | None) -> str:
    """What to do; cost: of the value that would come next."""
    assert recipe.knob is not None
    first = "Train the model for it (graftwork.heal, or graftwork.train_exits for early exits)"
    if any(step.pass_.models for step in recipe.steps):
        first = "Give it another model beside this one"
    more = "" if cost is None else f"tolerate more (tolerance={cost.ratio + cost.error - 1:.2f}), "
    return f"{first}, {more}or set {recipe.knob.option} yourself"


def check_tolerance(recipe: Recipe, tolerance: float | None) -> None:
    """Errors: `InputError` for a tolerance that is none, or that no knob can keep."""
    if tolerance is None:
        return
    if recipe.knob is None:
        raise InputError(
            f"tolerance is given, but recipe {recipe.name!r} has no knob that a text could turn "
            f"(or it is set already): leave it out"
        )
    if isinstance(tolerance, bool) or not 0 < tolerance < 100:
        raise InputError(f"tolerance={tolerance!r}: expected a share above 0, such as 0.05")


def check_pace(made: Decoding, plain: Decoding, *, strict: bool) -> float:
    """See `pace_of`. Errors: `InputError` if strict, for a model that became slower."""
    speed = pace_of(made, plain)
    if strict and speed < SLOWER:
        raise InputError(
            f"recipe {made.recipe['name']!r} {_does(made)} at {speed:.2f} times the model's own "
            f"speed for {made.target}, and strict=True asks for {SLOWER} at least"
        )
    return speed


def _does(made: Decoding) -> str:
    """What a recipe makes faster, or slower."""
    return "reads prompts" if made.program.plan.step.ahead else "decodes"


def pace_of(made: Decoding, plain: Decoding, rounds: int = ROUNDS) -> float:
    """Tokens a second over the model's own, in turns: the median of some rounds. Of decoding, or,
    where prompts alone run otherwise, of a prompt."""
    reads = bool(made.program.plan.step.ahead)
    size = min(READING, made.program.info.context - 1) if reads else PROMPT
    prompt = [token % made.program.info.vocab_size for token in range(1, size + 1)]
    if "tokenizer.json" in made.program.assets:
        (document, *_) = read_corpus(SAMPLE, made.program)
        prompt = list(document)[:size]
    most = made.program.info.context - len(prompt)
    asked: dict[str, Any] = {"max_new_tokens": 1 if reads else min(TOKENS, most)}
    asked |= {"do_sample": False, "eos_token_id": []}
    rates: list[float] = []
    for place in range(rounds + 1):
        pair: list[float] = []
        for model in (made, plain):
            model.forget()
            settle()
            said = model.generate([prompt], return_dict_in_generate=True, pad_token_id=0, **asked)
            stats = said.stats
            pair.append(1 / stats.prefill_seconds if reads else stats.tokens_per_second)
        if place:  # the first one touches memory
            rates.append(pair[0] / pair[1])
    return statistics.median(rates)
