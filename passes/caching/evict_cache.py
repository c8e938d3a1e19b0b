"""Give a cache a budget: when it is full, a function of its own keeps the rows that count most.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T], past: i64[B], kv.0.key: f32[B,G,C,D], ...)

After (method "window", budget 1024, block 64, positions "cache")::

    upkeep func evict(past: i64[B], kv.0.key: f32[B,G,C,D], kv.0.value: f32[B,G,C,D], ...) {
      %zero: i64[B] = aten.full_like(%past, 0)
      %s: f32[B,G,C] = graftwork.row_scores_age(%kv.0.key)
      %k: i64[B,G,1024] = graftwork.keep_top(%s, %past, rows=1024, full=1088, sinks=4, recent=0)
      %x: f32[B,G,1024,D] = graftwork.take_rows(%kv.0.key, %k)
      %y: f32[B,G,1024,D] = graftwork.turn_rows(%x, %k, @positions.cos, @positions.sin)
      %kw: f32[B,G,C,D] = graftwork.cache_write(%kv.0.key, %y, %zero)
      ...
    decode {
      cache = evict(function="evict", budget=1024, block=64, turned=true)

A cache of `budget` + `block` rows is full. Each head of a layer's keys chooses for itself (methods
that look at all heads say so), or each head of its queries (`heads`). Methods that weigh attention
keep the queries of the last `block` rows, which the step writes, and h2o a sum a row. A draft's own
cache, where the step makes the draft, keeps its first rows and its latest. Where the draft is made
by functions of its own, their caches keep every row, in buffers of their own::

    state eagle.kv.8.key: f32[B,G,C.1001,D] layer=8 part="key"

positions: "absolute", rows keep the positions of the text, which ends at the model's context; or
"cache", a row's position is its place among the rows of its own layer, so that texts may be
endless: the kept keys are turned to where they end up, and nothing sees further than the budget.
Turning again and again adds rounding errors, in half precision some percent over a long text; the
sinks are never turned, and a window's rows only as often as blocks fit into it.

Layers that look back over a sliding window hold the rows that it reaches, and no more: they lose
nothing. The budget is that of the others.

Refuses attention that looks back a fixed distance otherwise (chunks, ALiBi), because what it should
see depends on positions that are gone; models that have sliding windows alone, or whose draft has
some; keys that a rotation did not make last (positions "cache"); a budget that is no multiple of
the block, too small for what is always kept and one draft, or never full within the model's
context; a cache that loses rows already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ...ir import Function, InputError, Program, Role, State
from ...ir.plan import Evict
from ...ir.plan.bounds import Context, Nodes
from ..engine.base import Evidence, Length, Outcome, TextSample
from ..policies import builds
from .budgets.base import BUDGETS, alike
from .cached_rows import Written, written
from .contents import LearnedContents, RecordedContents
from .evict_function import DRAFTS, OPENING, WINDOW, Builder
from .evict_settings import Settings
from .layer_budgets import narrow, narrowed, with_rows_of
from .query_heads import by_query_head
from .scores.base import SCORES
from .scores.window import window

G = torch.ops.graftwork


@builds(Evict)
class EvictCache(LearnedContents, RecordedContents):
    """budget, block: see the record. method: which rows count, by name (see `scores`). tuning: the
    rule's own options. sinks, recent: of the kept rows, those that always stay, at the start and at
    the end; -1: as the method has it. positions: "absolute" or "cache", see above. ahead: positions
    beyond the text's end that a method looks at which judges by what is to come. opening: first
    tokens of a text that a method asks which judges by its instruction.
    heads: "shared", heads of queries that share keys keep the same rows, by the mean of what they
    give them; or "own", each head keeps rows of its own (see `query_heads`). layers: how many rows
    caches keep, by name (see `budgets`). windows, length: of the text that budgets are found on."""

    method: str = window.name
    tuning: dict[str, bool | int | float] = Field(default_factory=dict)
    sinks: Annotated[int, Field(ge=-1)] = -1
    recent: Annotated[int, Field(ge=-1)] = -1
    positions: Literal["absolute", "cache"] = "absolute"
    ahead: Context = 512
    opening: Nodes = 32
    heads: Literal["shared", "own"] = "shared"
    layers: str = alike.__name__
    length: Length = 2048

    name: ClassVar[str] = "evict_cache"

    @model_validator(mode="after")
    def _is_known(self) -> EvictCache:
        try:
            SCORES.find(self.method).tuned(self.tuning)
            BUDGETS.find(self.layers)
        except InputError as error:  # options are refused as what is wrong with a value
            raise ValueError(str(error)) from error
        return self

    @property
    def text(self) -> TextSample | None:
        """What budgets are found on."""
        return self.sample if BUDGETS.find(self.layers).reads_text else None

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """The same as `run`, with budgets that are found on text."""
        self._refuse_windows(program)
        return self.evicted(program, evidence.sampled(self.sample, program))

    def run(self, program: Program) -> Outcome:
        self._refuse_windows(program)
        return self.evicted(program, None)

    def _refuse_windows(self, program: Program) -> None:
        caches = list(written(program.step, program))
        self.refuse(
            bool(caches) and all(cache.window is not None for cache in caches),
            f"every layer of {program.name} looks back over a sliding window: there is no other "
            f"whose rows could be chosen among (hold_windows drops what no window reaches)",
        )

    def evicted(
        self, program: Program, windows: torch.Tensor | None, *, windows_alone: bool = False
    ) -> Outcome:
        """The program with a budget. windows: i64[N,T], of text to find budgets on. windows_alone:
        only layers that look back over a window drop rows; the budget is one that no text fills."""
        self.refuse(
            program.recurrent,
            f"{program.name} has recurrences, which hold what all rows add up to: none can be "
            f"dropped from that, and their places count for what comes next",
        )
        self.refuse_shared(program)
        functions = {name: fn.copy() for name, fn in program.functions.items()}
        kept = _apart(program)
        writes = list(self._writes(functions, program, kept))
        if not writes:
            return Outcome(program, 0, "no function writes keys and values into caches")
        own = [write for write in writes if program.step.has_input(write.names[0])]
        for write in writes:
            self.refuse(
                write.window is not None and not program.step.has_input(write.names[0]),
                f"{write.what} looks back over a sliding window, and is a draft's",
            )
        settings = Settings.of(self, self.made(), program, own, windows)
        states = dict(program.states)
        states.update({name: narrowed(states[name], DRAFTS) for name in kept})
        for fn in functions.values():
            with_rows_of(fn, [states[name] for name in kept])
        remarks: tuple[str, ...] = ()
        if self.heads == "own":
            chosen = [write for write in own if write.window is None]
            remarks = by_query_head(chosen, functions.values(), states)
        classes = _classes(settings, program, own, functions, states)
        builder = Builder(settings, program, functions, states, classes)
        for write in writes:
            if not windows_alone or write.window is not None:
                builder.add(write)
        evict = builder.finish()
        functions[evict.name] = evict
        always = settings.score.needs("sums") or settings.asks_opening or bool(settings.by_cache)
        record = replace(
            settings.record,
            function=evict.name,
            budget=settings.most,
            turned=settings.turned,
            window=WINDOW if builder.keeps_queries else "",
            always=always,
            since=_since(settings) if always else 0,
            capacities=tuple(classes),
            budgets=tuple(classes.values()),
            opening=OPENING if settings.asks_opening else "",
            opening_rows=self.opening,
            drafts=DRAFTS if kept else "",
        )
        plan = replace(program.plan, cache=record)
        made = program.replace(functions=functions, states=states, plan=plan)
        return Outcome(made, len(writes), remarks=remarks)

    def _writes(
        self, functions: dict[str, Function], program: Program, kept: frozenset[str]
    ) -> Iterator[Written]:
        """Of each layer with a cache that is not kept whole the first write; of the target's, from
        its plain step."""
        self.refuse_places(program, "which rows that were dropped would shift")
        for fn in functions.values():
            self.refuse(
                bool(fn.calls(G.attend_rows.default)),
                f"{fn.name} reads picked rows of caches, and no attention reads all: leave out "
                f"the pass that picks, or this one",
            )
        seen = set(kept)
        step = program.step.name
        first = sorted(
            functions.values(), key=lambda fn: (fn.name != step, fn.role is not Role.TARGET)
        )
        for fn in first:
            for write in written(fn, program):
                if seen.intersection(write.names):
                    continue
                self.refuse(
                    not write.whole,
                    f"{fn.name}: attention of {', '.join(write.names)} reads what is not a cache's "
                    f"rows",
                )
                seen.update(write.names)
                yield write
        lost = [n for n, s in program.states.items() if s.grows and n not in seen]
        self.refuse(bool(lost), f"no attention reads {', '.join(lost)} as keys and values")


def _apart(program: Program) -> frozenset[str]:
    """States of functions that draft and that no step reads."""
    read = {name for step in program.plan.step.variants for name in program.states_of(step)}
    drafts = (fn for leaf in program.plan.draft.leaves for fn in leaf.cached)
    own = {name for fn in drafts for name in program.states_of(fn)}
    return frozenset(name for name in own - read if program.states[name].grows)


def _since(settings: Settings) -> int:
    """Rows of a text before which nothing is dropped, nor added up: 0 where all rows count."""
    if settings.score.needs("sums"):
        return 0
    budgets = settings.by_cache or (settings.most,)
    return min(budgets) + settings.record.block


def _classes(
    settings: Settings,
    program: Program,
    caches: list[Written],
    functions: dict[str, Function],
    states: dict[str, State],
) -> dict[str, int]:
    """Capacities for layers of the target that keep fewer rows than others, and how many; functions
    and states are made to use them."""
    classes: dict[int, str] = {}
    kept: dict[int | None, list[State]] = {}
    for budget, write in zip(settings.by_cache, caches, strict=bool(settings.by_cache)):
        own = [states[name] for name in write.names]
        fewer = budget if budget < settings.most else None
        if fewer is not None:
            symbol = classes.setdefault(budget, f"C.{len(classes) + 2}")
            own = [narrowed(state, symbol) for state in own]
            states.update({state.name: state for state in own})
        if fewer is not None or write.window is not None:
            kept.setdefault(fewer, []).extend(own)
    for fn in functions.values():
        for fewer, own in kept.items():
            narrow(fn, program, own, fewer, settings.record.block, turned=settings.turned)
    return {symbol: budget for budget, symbol in classes.items()}
