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
cache, where the step makes the draft, keeps its first rows and its latest.

positions: "absolute", rows keep the positions of the text, which ends at the model's context; or
"cache", a row's position is its place, so that texts may be endless: the kept keys are turned to
where they end up, and nothing sees further than the budget. Turning again and again adds rounding
errors, in half precision some percent over a long text; the sinks are never turned.

Refuses attention that looks back a fixed distance (sliding windows, chunks, ALiBi), because what
it should see depends on positions that are gone; keys that a rotation did not make last (positions
"cache"); a budget that is no multiple of the block, too small for what is always kept and one
draft, or never full within the model's context; a cache that loses rows already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field, model_validator

from ...ir import (
    Function,
    InputError,
    PassError,
    Program,
    Role,
    State,
    Sym,
    TensorType,
    UnsupportedError,
    type_of,
)
from ...ir.plan import Evict
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.expand import inline
from ..engine.base import Effect, Evidence, Outcome, TextSample, register
from .budgets.base import BUDGETS, alike
from .cached_rows import ATTENDS, CachedRows, Written, reach_of, written
from .contents import CacheContents, upkeep
from .evict_settings import Settings
from .layer_budgets import narrow, narrowed
from .query_heads import by_query_head
from .rotation import table_of
from .scores.base import SCORES, RowScore
from .scores.window import window

A, G = torch.ops.aten, torch.ops.graftwork
WINDOW, OPENING = "C.1", "C.1000"

Rows = Annotated[int, Field(ge=1, le=2**31 - 1)]


@register
class EvictCache(CacheContents):
    """method: which rows count, by name (see `scores`). tuning: the rule's own options. budget:
    rows that are kept. block: rows that come before some are dropped. sinks, recent: of the kept
    ones, those that always stay, at the start and at the end; -1: as the method has it.
    positions: "absolute" or "cache", see above. ahead: positions beyond the text's end that methods
    look at which judge by what is to come. opening: first tokens of a text that
    methods ask which judge by its instruction.
    heads: "shared", heads of queries that share keys keep the same rows, by what they give them on
    average; or "own", each head keeps rows of its own, of which caches then hold as many times more
    (see `query_heads`).
    layers: how many rows caches keep, by name (see `budgets`): "alike"; "pyramid": the budget is
    what a layer keeps on average, the first ones more and the last ones less; "adaptive": it is
    what a layer's caches keep on average, each of them as many as its heads look at on text, of
    which `windows` of `length` tokens are read; or "spans": it is what all caches keep on average,
    each as far back as its heads look on text."""

    method: str = window.name
    tuning: dict[str, bool | int | float] = Field(default_factory=dict)
    budget: Rows = 1024
    block: Rows = 64
    sinks: Annotated[int, Field(ge=-1)] = -1
    recent: Annotated[int, Field(ge=-1)] = -1
    positions: Literal["absolute", "cache"] = "absolute"
    ahead: Rows = 512
    opening: Rows = 32
    heads: Literal["shared", "own"] = "shared"
    layers: str = alike.__name__
    windows: Annotated[int, Field(ge=1, le=4096)] = 8
    length: Rows = 2048

    name: ClassVar[str] = "evict_cache"
    reads: ClassVar[frozenset[Effect]] = CacheContents.reads | {Effect.DECODE_PLAN}

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
        reads = BUDGETS.find(self.layers).reads_text
        return TextSample(self.windows, self.length) if reads else None

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """The same as `run`, with budgets that are found on text."""
        assert self.text is not None
        return self._made(program, evidence.sampled(self.text, program))

    def run(self, program: Program) -> Outcome:
        """Add the function, and what it needs of the step. See the module docstring."""
        return self._made(program, None)

    def _made(self, program: Program, windows: torch.Tensor | None) -> Outcome:
        self.refuse(
            program.recurrent,
            f"{program.name} has recurrences, which hold what all rows add up to: none can be "
            f"dropped from that, and their places count for what comes next",
        )
        functions = {name: fn.copy() for name, fn in program.functions.items()}
        writes = list(self._writes(functions, program))
        if not writes:
            return Outcome(program, 0, "no function writes keys and values into caches")
        own = [write for write in writes if program.step.has_input(write.names[0])]
        settings = Settings.of(self, program, own, windows)
        states = dict(program.states)
        remarks: tuple[str, ...] = ()
        if self.heads == "own":
            remarks = by_query_head(own, functions.values(), states)
        classes = _classes(settings, writes, program, functions, states)
        builder = _Builder(settings, program, functions, states, classes)
        for write in writes:
            builder.add(write)
        evict = builder.finish()
        functions[evict.name] = evict
        record = Evict(
            evict.name,
            settings.most,
            self.block,
            turned=settings.turned,
            window=WINDOW if builder.keeps_queries else "",
            always=settings.score.needs("sums") or settings.asks_opening or bool(classes),
            capacities=tuple(classes),
            budgets=tuple(classes.values()),
            opening=OPENING if settings.asks_opening else "",
            opening_rows=self.opening,
        )
        plan = replace(program.plan, cache=record)
        made = program.replace(functions=functions, states=states, plan=plan)
        return Outcome(made, len(writes), remarks=remarks)

    def _writes(self, functions: dict[str, Function], program: Program) -> Iterator[Written]:
        """Of each layer with a cache the first write; of the target's, from its plain step."""
        for fn in functions.values():
            for mask in fn.calls(G.step_mask.default):
                near = reach_of(mask)
                shifted = "which rows that were dropped would shift"
                self.refuse(bool(near), f"{fn.name} looks back over {near}, {shifted}")
            by_distance = fn.calls(G.alibi.default, G.distance_bias.default)
            self.refuse(
                bool(by_distance and fn.calls(G.step_mask.default)),
                f"{fn.name} weighs rows by their distance (ALiBi, or a table), and dropped rows "
                f"would shift it",
            )
        seen: set[str] = set()
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


def _classes(
    settings: Settings,
    writes: list[Written],
    program: Program,
    functions: dict[str, Function],
    states: dict[str, State],
) -> dict[str, int]:
    """Capacities for layers of the target that keep fewer rows than others, and how many; functions
    and states are made to use them."""
    classes: dict[int, str] = {}
    caches = [write for write in writes if program.step.has_input(write.names[0])]
    for budget, write in zip(settings.by_cache, caches, strict=bool(settings.by_cache)):
        if budget == settings.most:
            continue
        symbol = classes.setdefault(budget, f"C.{len(classes) + 2}")
        own = [narrowed(states[name], symbol) for name in write.names]
        states.update({state.name: state for state in own})
        for fn in functions.values():
            narrow(fn, own, budget, settings.options.block)
    return {symbol: budget for budget, symbol in classes.items()}


class _Builder:
    """Makes the function that evicts, layer by layer."""

    def __init__(
        self,
        settings: Settings,
        program: Program,
        functions: dict[str, Function],
        states: dict[str, State],
        classes: dict[str, int],
    ) -> None:
        self.settings, self.classes, self.program = settings, classes, program
        self.block, self.refuse = settings.options.block, settings.options.refuse
        self.functions, self.states = functions, states
        self.fn = upkeep(program, "evict")
        self.past = self.fn.input("past")
        self.tables: dict[str, torch.fx.Node] = {}
        self.taken: list[tuple[str, torch.fx.Node]] = []
        self.keeps_queries = False

    def add(self, write: Written) -> None:
        """Keep a layer's rows."""
        fn, settings = self.fn, self.settings
        key = write.keys.names[0]
        given: dict[str, Any] = {
            name: self._floats(write, rows)
            for name, rows in (("keys", write.keys), ("values", write.values))
        }
        drafts = not self.program.step.has_input(key)
        score = window if drafts else settings.score
        sinks, recent = settings.sinks, settings.recent
        if drafts and settings.score is not window:
            sinks, recent = window.sinks, 0
        self.refuse(
            "softcap" in write.options and score.needs("scale"),
            f"{write.what} bounds what keys and queries come to (softcap), which this method "
            f"cannot foresee",
        )
        budget = self.classes.get(self.states[key].capacity or "", settings.most)
        full, past = budget + self.block, self.past
        if budget < settings.most:
            past = fn.call(A.clamp.default, past, None, full)
        given |= {"past": past, "block": self.block, "sinks": sinks, "recent": recent}
        self._add_needed(write, key, score, given)
        scores, sums = self._scored(score, given)
        rows = fn.call(
            G.keep_top.default, scores, past, rows=budget, full=full, sinks=sinks, recent=recent
        )
        for name in write.names:
            taken = fn.call(G.take_rows.default, fn.input(name), rows)
            if settings.turned and name == key:
                taken = self._turned(write, taken, rows)
            self.taken.append((name, taken))
        if sums is not None:
            taken = fn.call(G.take_rows.default, sums, rows)
            self.taken.append((str(given["sums"].target), taken))

    def _add_needed(self, write: Written, key: str, score: RowScore, given: dict[str, Any]) -> None:
        """Add what a rule needs of a layer, by name, and the states that hold it."""
        ahead = self.settings.options.ahead
        given |= {"ahead": ahead, "attention": write.options, "scale": write.options.get("scale")}
        if score.needs("queries", "opening"):
            given["queries"] = self._queries(write, key)
        if score.needs("cos", "sin", "interleaved"):
            tables = self._rotation(write, f"ahead={ahead}", self.block + ahead)
            given |= zip(("cos", "sin", "interleaved"), tables, strict=True)
        if score.needs("opening"):
            given["opening"] = self._opening(write, key, given["queries"], given["past"])
        if score.needs("sums"):
            dims = self.states[key].type.dims[:3]
            sums = self._new(key, "sums", TensorType(torch.float32, (*dims, 1)))
            given["sums"] = self._state(sums)

    def _scored(
        self, score: RowScore, given: dict[str, Any]
    ) -> tuple[torch.fx.Node, torch.fx.Node | None]:
        """A layer's scores, and its sums where the rule has some. Errors: `PassError` for a rule
        that refuses, or that gives something else."""
        own = self.settings.own if score is self.settings.score else {}
        numbers = {name: given[name] for name in score.numbers}
        tensors = [given[name] for name in score.tensors]
        try:
            made = inline(self.fn, score.function, *tensors, **numbers, **own)
        except (InputError, UnsupportedError) as error:
            raise PassError(f"evict_cache: {error}") from error
        made = made if isinstance(made, (tuple, list)) else (made,)
        found = [node.meta["type"] for node in made if isinstance(node, torch.fx.Node)]
        dims = type_of(given["keys"]).dims[:3]
        wanted = [TensorType(torch.float32, dims)]
        wanted += [type_of(given["sums"])] if score.needs("sums") else []
        self.refuse(
            found != wanted,
            f"the rule {score.name} returns {', '.join(map(str, found)) or made}; expected "
            f"{', '.join(map(str, wanted))}",
        )
        return made[0], (*made, None)[1]

    def _floats(self, write: Written, rows: CachedRows) -> torch.fx.Node:
        """Rows as numbers."""
        parts = [self._state(self.states[name]) for name in rows.names]
        return self.fn.call(G.stored_rows.default, *parts, **write.how) if write.how else parts[0]

    def _state(self, state: State) -> torch.fx.Node:
        if self.fn.has_input(state.name):
            return self.fn.input(state.name)
        return self.fn.add_input(state.name, state.type)

    def _new(self, key: str, part: str, type: TensorType) -> State:
        """A state beside a layer's keys."""
        name = f"{key.rpartition('.key')[0]}.{part}"
        state = State(name, type, self.states[key].layer, part)
        self.states[name] = state
        return state

    def _opening(
        self, write: Written, key: str, queries: torch.fx.Node, past: torch.fx.Node
    ) -> torch.fx.Node:
        """The queries of a text's first tokens, kept when their block ends, at its end."""
        batch, heads, _, dim = type_of(queries).dims
        type = TensorType(type_of(queries).dtype, (batch, heads, Sym(OPENING), dim))
        kept = self._state(self._new(key, "opening", type))
        count, block = self.settings.options.opening, self.block
        call = G.first_queries.default
        first = self.fn.call(call, kept, queries, past, block=block, count=count)
        self.taken.append((str(kept.target), first))
        what = f"opening={count}"
        cos, sin, interleaved = self._rotation(write, what, self.settings.most + block)
        self.refuse(
            cos is None,
            f"the queries of {write.what} are not what a rotation gives, and cannot be turned to a "
            f"text's end",
        )
        call = G.queries_at_end.default
        return self.fn.call(call, first, past, cos, sin, interleaved=interleaved)

    def _queries(self, write: Written, key: str) -> torch.fx.Node:
        """A state with the queries of the last block, written by every function of the target."""
        self.keeps_queries = True
        batch, heads, _, dim = type_of(write.attend.args[0]).dims  # type: ignore[arg-type]
        dtype = type_of(write.attend.args[0]).dtype  # type: ignore[arg-type]
        state = self._new(key, "query", TensorType(dtype, (batch, heads, Sym(WINDOW), dim)))
        for fn in self.functions.values():
            self._keep_queries(fn, key, state)
        return self._state(state)

    def _keep_queries(self, fn: Function, key: str, state: State) -> None:
        if fn.role is not Role.TARGET or not fn.has_input(key):
            return
        kept = fn.outputs[key]
        attends = [n for n in fn.calls(*ATTENDS) if n.args[1] is kept]
        self.refuse(
            len(attends) != 1,
            f"{fn.name}: {len(attends)} attentions read {key}; expected one, whose queries weigh "
            f"its rows",
        )
        place = fn.add_input(state.name, state.type)
        with fn.graph.inserting_before(attends[0]):
            past = fn.call(A.remainder.Scalar, fn.input("past"), self.block)
            kept = fn.call(G.cache_write.default, place, attends[0].args[0], past)
        fn.set_outputs({**fn.outputs, state.name: kept})

    def _turned(self, write: Written, taken: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
        """Keys as the rotation would have made them at their new places."""
        made = write.keys.new
        self.refuse(
            bool(write.how),
            f"positions='cache' turns keys to their new places, and those of {write.what} are "
            f"stored in few bits: use positions='absolute'",
        )
        self.refuse(
            not _is_rotated(made),
            f"positions='cache' turns keys to their new places, and those of {write.what} are not "
            f"what a rotation gives: use positions='absolute'",
        )
        assert isinstance(made, torch.fx.Node)
        cos, sin = (self._table(write, node, "positions='cache'") for node in made.args[1:3])
        inner = bool(made.kwargs.get("interleaved", False))
        return self.fn.call(G.turn_rows.default, taken, rows, cos, sin, interleaved=inner)

    def _rotation(
        self, write: Written, what: str, reach: int
    ) -> tuple[torch.fx.Node | None, torch.fx.Node | None, bool]:
        """The tables of what rotates queries, and how; none where nothing does. what: wants so many
        positions of them."""
        asked, key = write.attend.args[0], write.keys.new
        self.refuse(
            _is_rotated(key) and not _is_rotated(asked),
            f"the queries of {write.what} are not what a rotation gives, and its keys are: where "
            f"queries will look is not known",
        )
        if not _is_rotated(asked):
            return None, None, False
        assert isinstance(asked, torch.fx.Node)
        cos, sin = (self._table(write, node, what) for node in asked.args[1:3])
        known = int(str(type_of(cos).dims[0]))
        self.refuse(
            reach > known,
            f"{what} and block={self.block} look {reach} positions far, and the "
            f"rotations of {write.what} are known for {known}",
        )
        return cos, sin, bool(asked.kwargs.get("interleaved", False))

    def _table(self, write: Written, node: Any, what: str) -> torch.fx.Node:
        """A table of a rotation's angles, one row a position. what: wants it."""
        table = table_of(node)
        self.refuse(
            table is None,
            f"{what} needs the angles of {write.what} as tables: run the pass tabulate_positions "
            f"before, or leave the option out",
        )
        name = str(table.target)  # type: ignore[union-attr]
        if name not in self.tables:
            self.tables[name] = self.fn.weight(self.program.weights[name])
        return self.tables[name]

    def finish(self) -> Function:
        """Write what is kept over the first rows, when all of it was read."""
        fn = self.fn
        zero = fn.call(A.full_like.default, self.past, 0)
        outputs = {
            name: fn.call(G.cache_write.default, fn.input(name), rows, zero)
            for name, rows in self.taken
        }
        fn.set_outputs(outputs)
        sweep(fn)
        return fn


def _is_rotated(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is G.rotary.default
