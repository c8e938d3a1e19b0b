"""Calibration of early-exit thresholds with a risk guarantee: Learn then Test.

Thresholds are tested downwards from 1, where no token exits early (unless the threshold decays
along the text). A text's risk is the share of the model's own continuation that is missing with
early exits. The p-value of the hypothesis "the mean risk exceeds the tolerance" is valid for any
risk in 0..1 and any number of texts. Fixed sequence testing ends at the first threshold where it
cannot be rejected, so no correction for multiple tests is needed. The threshold before keeps the
tolerance with the stated confidence, for texts of the same distribution and length; the recipe runs
all layers for later tokens. The risk on held-out texts is reported.

Sources: Angelopoulos et al., "Learn then Test: Calibrating Predictive Algorithms to Achieve Risk
Control" (2021); Bates et al., "Distribution-Free, Risk-Controlling Prediction Sets" (2021), for the
Hoeffding-Bentkus bound; Schuster et al., "Confident Adaptive Language Modeling" (2022).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text as Line

from ..data.prompts import Prompts, read_prompts
from ..ir import InputError
from ..ir.execution.executable import Executable, Planned
from ..ir.plan import DecodePlan, FullDepth
from ..ir.plan.depth import ThresholdDepth
from ..model import Model
from ..recipe import Recipe
from ..runtime.generation import Generated, forget
from .agreement import continued, plain_plan

HELD_OUT = 0.25
"""Share of the prompts that a threshold is shown on."""
STEPS = 20
"""Tested thresholds: 1, 0.95, ..."""


@dataclass(frozen=True)
class Tried:
    """A tested threshold. risk: mean, 0..1. p: p-value. layers: mean per token."""

    threshold: float
    risk: float
    p: float
    layers: float


@dataclass(frozen=True)
class Calibrated:
    """Result of calibration. threshold: the lowest that holds. tolerance, confidence: the
    guarantee. tried: in order, with the failed one. held_out: on held-out texts (no p-value).
    tokens: new tokens per text that may exit early. texts, kept_apart: numbers of texts for
    calibration and held-out. total: layers of the model. recipe: with the threshold."""

    threshold: float
    tolerance: float
    confidence: float
    tried: tuple[Tried, ...]
    held_out: Tried
    tokens: int
    texts: int
    kept_apart: int
    total: float
    recipe: Recipe

    def save(self, path: str | Path) -> Path:
        """Write the recipe as YAML that `optimize` takes."""
        return self.recipe.save(path)

    def table(self) -> RenderableType:
        """For the terminal."""
        table = Table(box=None, pad_edge=False)
        for name in ("threshold", "layers a token", "risk", "p"):
            table.add_column(name, justify="right")
        for one in self.tried:
            mark = "bold" if one.threshold == self.threshold else ""
            cells = (f"{one.threshold:.2f}", f"{one.layers:.2f}", f"{one.risk:.3f}", f"{one.p:.3f}")
            table.add_row(*cells, style=mark)
        apart = self.held_out
        summary = (
            f"threshold {self.threshold:.2f}: a risk of at most {self.tolerance:g} with "
            f"{self.confidence:.0%} confidence, by {self.texts} texts of {self.tokens} new tokens, "
            f"behind which all layers run; on {self.kept_apart} that "
            f"were kept apart it is {apart.risk:.3f}, at {apart.layers:.2f} of {self.total:g} "
            f"layers a token"
        )
        return Group(table, Line(summary))


def calibrate_exits(
    model: Model,
    data: Prompts,
    *,
    tolerance: float,
    confidence: float = 0.95,
    tokens: int = 64,
    held_out: float = HELD_OUT,
    progress: Callable[[str], None] = lambda stage: None,
) -> Calibrated:
    """Find the lowest early-exit threshold that keeps a tolerance.

    model: of a recipe with early exits, such as calm or free. data: representative prompts, each
    continued greedily by `tokens` tokens. tolerance: mean share of the model's own continuation
    that may be missing (longest common subsequence, as in ROUGE-L). confidence: of the guarantee.
    held_out: share of held-out prompts.

    The returned recipe runs all layers after `tokens` new tokens. Errors: `InputError` for a model
    without a threshold, numbers outside 0..1, too few prompts for the guarantee, and if no
    threshold keeps it.
    """
    depth, prompts, count = _checked(model, data, tolerance, confidence, tokens, held_out)
    trial = _Trial(model.executable, prompts, tokens)
    every = range(len(prompts))
    # Evenly spread, because files are often sorted.
    apart = [int((i + 0.5) / held_out) for i in range(len(prompts) - count)]
    seen = [index for index in every if index not in set(apart)]

    def measured() -> Iterator[Tried]:
        for step in range(STEPS + 1):
            threshold = 1 - step / STEPS
            progress(f"threshold {threshold:.2f}")
            one = trial.at(threshold, seen)
            yield replace(one, p=p_value(one.risk, len(seen), tolerance))

    tried, threshold = lowest(measured(), 1 - confidence)
    if threshold is None:
        raise InputError(
            f"depth={depth.brief}: even at a threshold of 1 a mean risk of {tried[0].risk:.3f} (p="
            f"{tried[0].p:.3f}) is no promise of {tolerance:g} with {confidence:.0%} confidence: "
            f"{_why(depth)}promise less, or give more prompts"
        )
    recipe = Recipe.load(model.recipe).with_options(
        _settings(depth, depth.fixed(threshold, tokens))
    )
    return Calibrated(
        threshold,
        tolerance,
        confidence,
        tried,
        trial.at(threshold, apart),
        tokens,
        len(seen),
        len(apart),
        trial.total,
        recipe,
    )


def _checked(
    model: Model, data: Prompts, tolerance: float, confidence: float, tokens: int, held_out: float
) -> tuple[ThresholdDepth, list[list[int]], int]:
    """Depth record, prompts, and how many calibrate. Errors: see `calibrate_exits`."""
    depth = model.program.plan.depth
    if not isinstance(depth, ThresholdDepth):
        raise InputError(
            f"depth={depth.brief} has no threshold to find: give a model of a recipe whose tokens "
            f"leave early, such as calm or free"
        )
    if not depth.acts:
        raise InputError(
            f"depth={depth.kind} is untrained, and nothing leaves early until it is: train its "
            f"heads first (graftwork train, or graftwork.fit) and set the pass's option weights"
        )
    prompts = read_prompts(data, model.program)
    return depth, prompts, check_promise(len(prompts), tolerance, confidence, tokens, held_out)


def check_promise(
    prompts: int, tolerance: float, confidence: float, tokens: int, held_out: float = HELD_OUT
) -> int:
    """How many of so many prompts calibrate. Errors: `InputError` for numbers out of bounds, and
    for fewer prompts than the promise takes, even if no text differs."""
    for name, value in (("tolerance", tolerance), ("confidence", confidence)):
        if not 0 < value < 1:
            raise InputError(f"{name}={value}: expected a number between 0 and 1")
    if not 0 < held_out < 1 or tokens < 2:
        raise InputError(f"held_out={held_out}, tokens={tokens}: expected a share, and at least 2")
    count = prompts - math.ceil(prompts * held_out)
    if count < (least := least_texts(tolerance, confidence)):
        raise InputError(
            f"data: {prompts} prompts leave {count} to calibrate on, and a tolerance of "
            f"{tolerance:g} with {confidence:.0%} confidence needs at least {least}, even if none "
            f"differs: give {math.ceil(least / (1 - held_out))} prompts, or promise less"
        )
    return count


def _settings(before: ThresholdDepth, after: ThresholdDepth) -> list[str]:
    """Recipe settings that turn one record into the other; always with threshold and tokens."""
    changed = [
        field.name
        for field in fields(after)
        if field.name in ("threshold", "tokens")
        or getattr(before, field.name) != getattr(after, field.name)
    ]
    return [f"depth_{after.kind}.{name}={getattr(after, name)}" for name in changed]


def _why(depth: ThresholdDepth) -> str:
    """Why tokens exit at a threshold of 1, and what to do about it; "" if they do not."""
    if not depth.decay:
        return ""
    last = replace(depth, threshold=1.0).bound(1.0)
    return f"decay={depth.decay:g} lets them leave at {last:.2f} in the end; lower it, "


def lowest(measured: Iterator[Tried], error: float) -> tuple[tuple[Tried, ...], float | None]:
    """The tests up to the first p-value above `error`, and the threshold before it, if any."""
    tried: list[Tried] = []
    found = None
    for one in measured:
        tried.append(one)
        if one.p > error:
            break
        found = one.threshold
    return tuple(tried), found


def p_value(risk: float, count: int, tolerance: float) -> float:
    """p-value of the hypothesis "mean risk > tolerance" for a mean `risk` of `count` risks in 0..1:
    the smaller of Hoeffding's and Bentkus's bounds.

    >>> round(p_value(0.0, 29, 0.1), 4), p_value(0.2, 100, 0.1)
    (0.0471, 1.0)
    """
    if risk >= tolerance:
        return 1.0
    gap = (risk * math.log(risk / tolerance) if risk else 0.0) + (1 - risk) * math.log(
        (1 - risk) / (1 - tolerance)
    )
    hoeffding = math.exp(-count * gap)
    bentkus = math.e * _binomial(math.ceil(round(count * risk, 9)), count, tolerance)
    return min(1.0, hoeffding, bentkus)


def least_texts(tolerance: float, confidence: float) -> int:
    """Texts needed for the guarantee if all risks are 0.

    >>> least_texts(0.1, 0.95)
    29
    """
    return math.ceil(math.log(1 - confidence) / math.log(1 - tolerance))


def _binomial(most: int, count: int, chance: float) -> float:
    """Probability of at most `most` successes in `count` trials."""
    return math.fsum(
        math.exp(
            math.lgamma(count + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(count - hits + 1)
            + hits * math.log(chance)
            + (count - hits) * math.log1p(-chance)
        )
        for hits in range(most + 1)
    )


def lacking(own: Sequence[int], got: Sequence[int]) -> float:
    """Share of a text outside its longest common subsequence with another text.

    >>> lacking([1, 2, 3, 4], [9, 1, 3, 4])
    0.25
    """
    row = [0] * (len(got) + 1)
    for token in own:
        before = 0
        for place, other in enumerate(got, 1):
            above = row[place]
            row[place] = before + 1 if token == other else max(above, row[place - 1])
            before = above
    return 1 - row[-1] / len(own)


class _Trial:
    """A model's own continuations, and those with early exits."""

    def __init__(
        self, executable: Executable, prompts: Sequence[Sequence[int]], tokens: int
    ) -> None:
        self.executable, self.tokens = executable, tokens
        self.prompts = prompts
        self.plan = plan = executable.program.plan
        whole = replace(plain_plan(plan), depth=FullDepth())
        self.own = [self._text(whole, prompt) for prompt in prompts]
        self.total = self.own[0].stats.layers

    def at(self, threshold: float, which: Sequence[int]) -> Tried:
        """Mean risk and layers of some texts at a threshold; no p-value."""
        record: Any = self.plan.depth
        plan = replace(self.plan, depth=record.fixed(threshold, self.tokens))
        found, layers = [], []
        for index in which:
            text, start = self._text(plan, self.prompts[index]), len(self.prompts[index])
            own, got = (t.sequences[0, start:].tolist() for t in (self.own[index], text))
            found.append(lacking(own, got))
            layers.append(text.stats.layers)
        return Tried(threshold, statistics.mean(found), math.nan, statistics.mean(layers))

    def _text(self, plan: DecodePlan, prompt: Sequence[int]) -> Generated:
        forget(self.executable)  # no state is shared between texts
        return continued(Planned(self.executable, plan), prompt, self.tokens)
