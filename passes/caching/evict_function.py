"""The function that drops rows of caches, as `evict_cache` has it made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

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
    arguments,
    type_of,
)
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.expand import inline
from .cached_rows import ATTENDS, CachedRows, Written
from .contents import upkeep
from .evict_rotations import Rotations
from .evict_settings import Settings
from .scores.base import RowScore
from .scores.window import window

A, G = torch.ops.aten, torch.ops.graftwork
WINDOW, OPENING, DRAFTS = "C.1", "C.1000", "C.1001"


@dataclass
class Builder:
    """Makes the function, layer by layer.

    classes: budgets of layers that keep fewer rows, by the capacity of their states. keeps_queries:
    whether a rule asks for them.
    """

    settings: Settings
    program: Program
    functions: dict[str, Function]
    states: dict[str, State]
    classes: dict[str, int]
    taken: list[tuple[str, torch.fx.Node]] = field(default_factory=list)
    keeps_queries: bool = False

    def __post_init__(self) -> None:
        self.block, self.refuse = self.settings.record.block, self.settings.options.refuse
        self.fn = upkeep(self.program, "evict")
        self.rotations = Rotations(self.fn, self.program, self.block, self.refuse)
        self.past = self.fn.input("past")

    def add(self, write: Written) -> None:
        """Keep a layer's rows."""
        fn, settings = self.fn, self.settings
        key = write.keys.names[0]
        given: dict[str, Any] = {
            name: self._floats(write, rows)
            for name, rows in (("keys", write.keys), ("values", write.values))
        }
        drafts = not self.program.step.has_input(key)
        score = settings.score if write.window is None and not drafts else window
        sinks, recent = settings.sinks, settings.recent
        if write.window is not None:
            sinks, recent = 0, 0
        elif drafts and settings.score is not window:
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
                taken = self.rotations.turned(write, taken, rows)
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
            tables = self.rotations.of_queries(write, f"ahead={ahead}", self.block + ahead)
            given |= zip(("cos", "sin", "interleaved"), tables, strict=True)
        if score.needs("opening"):
            given["opening"] = self._opening(write, key, given["queries"], given["past"])
        if score.needs("sums"):
            dims = self.states[key].type.dims[:3]
            given["sums"] = self._new(key, "sums", TensorType(torch.float32, (*dims, 1)))

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
        parts = [self._state(name) for name in rows.names]
        return self.fn.call(G.stored_rows.default, *parts, **write.how) if write.how else parts[0]

    def _state(self, name: str) -> torch.fx.Node:
        return self.fn.taking(name, self.states[name].type)

    def _new(self, key: str, part: str, type: TensorType) -> torch.fx.Node:
        """A state beside a layer's keys."""
        name = f"{key.rpartition('.key')[0]}.{part}"
        self.states[name] = State(name, type, self.states[key].layer, part)
        return self._state(name)

    def _opening(
        self, write: Written, key: str, queries: torch.fx.Node, past: torch.fx.Node
    ) -> torch.fx.Node:
        """The queries of a text's first tokens, kept when their block ends, at its end."""
        batch, heads, _, dim = type_of(queries).dims
        type = TensorType(type_of(queries).dtype, (batch, heads, Sym(OPENING), dim))
        kept = self._new(key, "opening", type)
        count, block = self.settings.options.opening, self.block
        call = G.first_queries.default
        first = self.fn.call(call, kept, queries, past, block=block, count=count)
        self.taken.append((str(kept.target), first))
        what = f"opening={count}"
        cos, sin, interleaved = self.rotations.of_queries(write, what, self.settings.most + block)
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
        asked = type_of(arguments(write.attend)["q"])
        batch, heads, _, dim = asked.dims
        state = self._new(key, "query", TensorType(asked.dtype, (batch, heads, Sym(WINDOW), dim)))
        for fn in self.functions.values():
            self._keep_queries(fn, key, str(state.target))
        return state

    def _keep_queries(self, fn: Function, key: str, name: str) -> None:
        if fn.role is not Role.TARGET or not fn.has_input(key):
            return
        kept = fn.outputs[key]
        attends = [n for n in fn.calls(*ATTENDS) if n.args[1] is kept]
        self.refuse(
            len(attends) != 1,
            f"{fn.name}: {len(attends)} attentions read {key}; expected one, whose queries weigh "
            f"its rows",
        )
        place = fn.add_input(name, self.states[name].type)
        with fn.graph.inserting_before(attends[0]):
            past = fn.call(A.remainder.Scalar, fn.input("past"), self.block)
            kept = fn.call(G.cache_write.default, place, attends[0].args[0], past)
        fn.set_outputs({**fn.outputs, name: kept})

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
