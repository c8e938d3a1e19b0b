"""Choice of the fastest draft tree from measured acceptance rates and step times.

At each step of a generation with known text, the drafter reads the true continuation level by
level, and the rank of the true token among its candidates is counted; then it drafts as usual. This
estimates the probability that the candidate of rank r at depth d is accepted given its parent, for
`StaticTree.best`. Source: Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative
Decoding" (2024).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text as Line

from ..artifact.saved import is_saved
from ..backends.target import Target
from ..data.calibration import check_text
from ..data.prompts import Prompts, check_file, read_prompts
from ..ir import InputError
from ..ir.execution.executable import Executable, Planned
from ..ir.plan import FixedLength, KeepAll, StaticTree
from ..ir.plan.inputs import ANCESTORS
from ..ir.plan.shapes import expected
from ..model import Model, as_target, load
from ..optimizing import optimize
from ..recipe import Recipe, Use
from ..runtime.asking.options import BEST
from ..runtime.asking.request import read_request
from ..runtime.asking.text import Text
from ..runtime.cache.keep_all import KeepAllPolicy
from ..runtime.feeding.draft import Draft
from ..runtime.feeding.feed import Feeder, StepFeed
from ..runtime.feeding.prefill import prefill
from ..runtime.loop import run
from ..runtime.rounds import Decoding
from ..runtime.speculate.drafters.grown import GrownDrafter
from ..runtime.speculate.lengths.base import LengthPolicy
from ..runtime.speculate.proposers.base import Proposer
from ..runtime.speculate.trees.base import TreePolicy
from ..tracing.traced import Source
from .agreement import OwnText, continued, is_approximate, own_text, plain_plan

Clock = Callable[[], float]
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
FIRST_TREE = StaticTree.of([(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 0, 0)])
"""The tree during measurement, if the recipe has none."""


class Recorder(TreePolicy):
    """Tree policy that counts ranks of true tokens, then delegates to another policy. truth: the
    whole sequence."""

    def __init__(self, inner: TreePolicy, truth: list[int], text: Text, found: Found) -> None:
        super().__init__(inner.record)
        self.inner, self.truth, self.text, self.found = inner, truth, text, found

    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        found = self.found
        coming = self.truth[len(self.text.tokens) :]
        most = min(found.depth, proposer.depth or found.depth, depths[0])
        for depth, token in enumerate(coming[:most]):
            start = found.clock()
            if depth:
                before = np.array([[coming[depth - 1]]])
                level = proposer.grow(before, np.zeros((1, 1), dtype=np.int64), found.ranks)
            else:
                level = proposer.root(found.ranks)
            found.level_seconds.append(found.clock() - start)
            found.asked[depth] += 1
            places = np.flatnonzero(level.tokens[0, 0] == token)
            if not len(places):
                break
            found.counts[depth, places[0]] += 1
        return self.inner.grow(proposer, depths, length)


class Found:
    """Counts of `Recorder` over all prompts. counts: f64[D,K] of ranks by depth; asked: f64[D],
    totals. level_seconds: time of each level."""

    def __init__(self, depth: int, ranks: int, clock: Clock) -> None:
        self.depth, self.ranks, self.clock = depth, ranks, clock
        self.counts, self.asked = np.zeros((depth, ranks)), np.zeros(depth)
        self.level_seconds: list[float] = []

    @property
    def rates(self) -> tuple[tuple[float, ...], ...]:
        """Acceptance rates by depth and rank, for depths that were reached."""
        reached = self.asked > 0
        rates = self.counts[reached] / self.asked[reached, None]
        return tuple(tuple(row) for row in rates.tolist())


@dataclass(frozen=True)
class Choice:
    """A tree, its expected tokens per step, and its tokens per second."""

    tree: StaticTree | None
    tokens: float
    speed: float

    @property
    def nodes(self) -> int:
        """0: plain decoding."""
        return 0 if self.tree is None else self.tree.most


@dataclass(frozen=True)
class Tuned:
    """Measurements and the chosen tree. recipe: with the tree. rates: see `Found.rates`. seconds:
    of a step by width. drafting: seconds per level. choices: by number of nodes, plain decoding
    first. own: agreement of an approximate recipe with the target's text."""

    recipe: Recipe
    rates: tuple[tuple[float, ...], ...]
    seconds: Mapping[int, float]
    drafting: float
    choices: tuple[Choice, ...]
    best: Choice
    own: OwnText | None = None

    def save(self, path: str | Path) -> Path:
        """Write the recipe as YAML that `optimize` takes."""
        return self.recipe.save(path)

    def table(self) -> RenderableType:
        """Predicted tokens per second by number of nodes, for the terminal."""
        table = Table(box=None, pad_edge=False)
        for name in ("nodes", "depth", "tokens a step", "step ms", "tokens/s"):
            table.add_column(name, justify="right")
        by_nodes = {choice.nodes: choice for choice in (*self.choices, self.best)}
        widths = list(self.seconds)
        for _, choice in sorted(by_nodes.items()):
            depth = 0 if choice.tree is None else choice.tree.depth
            step = np.interp(choice.nodes + 1, widths, list(self.seconds.values()))
            mark = "bold" if choice.nodes == self.best.nodes else ""
            cells = (f"{choice.tokens:.2f}", f"{1e3 * step:.2f}", f"{choice.speed:.0f}")
            table.add_row(str(choice.nodes), str(depth), *cells, style=mark)
        gain = self.best.speed / self.choices[0].speed
        note = f"best: {self.best.nodes} nodes, {gain:.2f} times plain decoding's speed"
        lines = [Line(note if gain > 1 else f"{note}: drafting does not pay here")]
        if self.own is not None:
            lines.append(Line(f"approximate: the recipe keeps {self.own}"))
        return Group(table, *lines)


def tune(
    model: Source | Model,
    recipe: str | Path | Mapping[str, Any] | Recipe | None = None,
    *,
    data: Prompts,
    target: Target | str | None = None,
    text: Prompts | None = None,
    prompts: int = 8,
    tokens: int = 64,
    depth: int = 8,
    ranks: int = 8,
    widths: Sequence[int] = WIDTHS,
    nodes: int | None = None,
    clock: Clock = perf_counter,
    progress: Callable[[str], None] = lambda stage: None,
) -> Tuned:
    """Measure a recipe's drafter and steps on a target, and choose its tree.

    model: as for `optimize`, a saved artifact's folder, or a `Model`. data: representative prompts;
    `prompts` of them are continued by `tokens` tokens. text: calibration text. depth, ranks:
    measured levels and candidates per level. widths: of timed steps. nodes: fixed number of nodes;
    None: the fastest. Errors: `InputError` for a drafter that does not predict level by level, or
    for more nodes than were timed.
    """
    if nodes is not None and not 0 < nodes < max(widths):
        raise InputError(f"nodes={nodes}: expected 1 to {max(widths) - 1}, the widths timed less 1")
    check_file(data)
    opened = _open(model, recipe, target, text, progress)
    texts = read_prompts(data, opened.program)[:prompts]
    progress("compile")
    drafted = _with_tree(opened)
    rates, drafting = measure_rates(
        drafted, texts, tokens=tokens, depth=depth, ranks=ranks, clock=clock, progress=progress
    )
    progress("time steps")
    seconds = measure_steps(drafted, texts[0], widths, clock=clock)
    choices = evaluate(rates, seconds, drafting)
    fitting = choices[1:] if nodes is None else choices[nodes : nodes + 1]
    best = max(fitting, key=lambda choice: choice.speed)
    sizes = {width - 1 for width in seconds}
    shown = tuple(choice for choice in choices if choice.nodes in sizes)
    recipe_ = with_tree(Recipe.load(opened.recipe), best.tree or FIRST_TREE, str(opened.target))
    own = own_text(drafted, texts, tokens) if is_approximate(opened.program) else None
    return Tuned(recipe_, rates, seconds, drafting, shown, best, own)


def measure_rates(
    executable: Executable,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    depth: int,
    ranks: int,
    clock: Clock = perf_counter,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[tuple[tuple[float, ...], ...], float]:
    """Acceptance rates by depth and rank, and the median seconds of a level of predictions."""
    found = Found(depth, ranks, clock)
    program = executable.program
    plain = Planned(executable, plain_plan(program.plan))
    for number, prompt in enumerate(prompts, 1):
        progress(f"measure acceptance: prompt {number} of {len(prompts)}")
        truth = continued(plain, prompt, tokens).sequences[0].tolist()
        with torch.no_grad(), executable.turn:
            start = torch.tensor([list(prompt)])
            keywords = {**BEST, "max_new_tokens": tokens, "eos_token_id": None}
            keywords["attention_mask"] = torch.ones_like(start)
            request = read_request(start, keywords, program)
            decoding = Decoding(executable, request)
            if not isinstance(decoding.drafter, GrownDrafter):
                raise InputError(
                    f"draft={program.plan.draft} does not draw a tree from predictions; "
                    f"tune a recipe with a drafter that does, such as medusa"
                )
            (text,) = request.texts
            decoding.drafter.tree = Recorder(decoding.drafter.tree, truth, text, found)
            run(decoding)
    if not found.asked[0]:
        raise InputError("the prompts are too near the end of the context to draft anything")
    return found.rates, statistics.median(found.level_seconds)


def measure_steps(
    executable: Executable,
    prompt: Sequence[int],
    widths: Sequence[int],
    *,
    repeats: int = 15,
    clock: Clock = perf_counter,
) -> dict[int, float]:
    """Median seconds of a step by width, after `prompt`."""
    program = executable.program
    feeder = Feeder(executable, 1, program.step.name, parts=program.plan.step.parts)
    fetch = ("argmax",) if "argmax" in program.step.outputs else ("logits",)
    start = min(len(prompt), max(feeder.context - max(widths), 1))
    usable = [width for width in sorted(widths) if feeder.width(width, start) == width]
    times: dict[int, list[float]] = {width: [] for width in usable}
    rows = {width: [int(token) for token in np.resize(prompt, width)] for width in usable}
    with executable.turn:
        feeder.begin(start + max(usable), max(usable) - 1)
        text = Text(list(prompt[:start]), start, start + max(usable))
        for _ in prefill(feeder, [text], fetch, KeepAllPolicy(KeepAll(), executable)):
            pass
        for width in usable * (repeats + 1):
            trees = [Draft(rows[width][1:], None, (-1,) * (width - 1))] if width > 1 else None
            before = clock()
            feeder.run(StepFeed([rows[width]], [start], [start], fetch, width, trees))
            times[width].append(clock() - before)
    # The first round compiles.
    return {width: statistics.median(taken[1:]) for width, taken in times.items()}


def evaluate(
    rates: Sequence[Sequence[float]], seconds: Mapping[int, float], drafting: float
) -> list[Choice]:
    """The best tree of every timed size, over all depths; plain decoding first."""
    widths = sorted(seconds)
    times = np.maximum.accumulate([seconds[width] for width in widths])
    choices = [Choice(None, 1.0, 1 / seconds[widths[0]])]
    for nodes in range(1, widths[-1]):
        step = float(np.interp(nodes + 1, widths, times))
        found = []
        for depth in range(1, len(rates) + 1):
            tree = StaticTree.best(rates[:depth], nodes)
            tokens = expected(tree.paths, rates)
            found.append(Choice(tree, tokens, tokens / (step + drafting * tree.depth)))
        choices.append(max(found, key=lambda choice: choice.speed))
    return choices


def with_tree(recipe: Recipe, tree: StaticTree, target: str) -> Recipe:
    """The recipe with this tree."""
    kept = [use for use in recipe.passes if not use.name.startswith("tree_")]
    if "accept_trees" not in [use.name for use in kept]:
        kept.append(Use("accept_trees"))
    paths = [list(path) for path in tree.paths]
    title = f"{recipe.title}; tree tuned for {target}"
    uses = (*kept, Use("tree_static", {"paths": paths}))
    return replace(recipe, name=f"{recipe.name}_tuned", title=title, passes=uses)


def _open(
    model: Source | Model,
    recipe: str | Path | Mapping[str, Any] | Recipe | None,
    target: Target | str | None,
    text: Prompts | None,
    progress: Callable[[str], None],
) -> Model:
    if isinstance(model, (str, Path)) and is_saved(Path(model)):
        model = load(model, target=target)
    if isinstance(model, Model):
        if recipe is not None:
            raise InputError("the model is optimized already: tune it without a recipe")
        return model
    if recipe is None:
        raise InputError("tune needs a recipe, such as medusa")
    chosen = Recipe.load(recipe)
    check_text([chosen], text)
    as_target(target).require_device()
    if "accept_trees" not in [use.name for use in chosen.passes]:
        chosen = replace(chosen, passes=(*chosen.passes, Use("accept_trees")))
    return optimize(model, chosen, target=target, data=text, progress=progress)


def _with_tree(model: Model) -> Executable:
    """The model's executable with tree drafts of unlimited length."""
    plan = model.program.plan
    if not model.program.step.has_input(ANCESTORS):
        raise InputError(
            "the model's step takes no trees: optimize it with the pass accept_trees, or give the "
            "checkpoint and a recipe"
        )
    tree = plan.tree if plan.tree.branches else FIRST_TREE
    program = model.program.replace(plan=replace(plan, tree=tree, length=FixedLength()))
    return replace(model, program=program).executable
