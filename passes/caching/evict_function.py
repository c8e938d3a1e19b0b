"""What the options of `evict_cache` come to for a program, and the function that drops rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
from ...ir.plan import Evict
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.expand import inline
from .budgets.base import BUDGETS
from .cached_rows import ATTENDS, CachedRows, Written
from .contents import upkeep
from .rotation import Rotation
from .scores.base import SCORES, RowScore
from .scores.window import window

if TYPE_CHECKING:  # settings are made from the options of the pass, which holds none itself
    from .evict_cache import EvictCache

A, G = torch.ops.aten, torch.ops.graftwork
WINDOW, OPENING = "C.1", "C.1000"


@dataclass(frozen=True)
class Settings:
    """What the options come to for a program. record: with the budget and the block. score: the
    rule, and `own` its options. sinks, recent: rows that are kept in any case. by_cache: rows of
    each cache; none: all the same."""

    options: EvictCache
    record: Evict
    score: RowScore
    own: dict[str, Any]
    sinks: int
    recent: int
    by_cache: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Rows that the layers keep which keep most."""
        return max(self.by_cache, default=self.record.budget)

    @property
    def turned(self) -> bool:
        """Whether keys are turned to their new places."""
        return self.options.positions == "cache"

    @property
    def asks_opening(self) -> bool:
        """Whether the queries of a text's first tokens are kept."""
        return self.score.needs("opening")

    @classmethod
    def of(
        cls,
        options: EvictCache,
        record: Evict,
        program: Program,
        caches: Sequence[Written],
        windows: torch.Tensor | None,
    ) -> Settings:
        """caches: of the step. windows: of text, to find budgets on. Errors: `PassError` for a
        budget that cannot be kept to."""
        score, refuse = SCORES.find(options.method), options.refuse
        budget, block = record.budget, record.block
        share = score.recent if score.recent >= 1 else score.recent * budget
        sinks = score.sinks if options.sinks < 0 else options.sinks
        recent = int(share) if options.recent < 0 else options.recent
        refuse(
            sinks + recent >= budget,
            f"budget={budget} leaves no row to choose beside sinks={sinks} and recent={recent}",
        )
        options.refuse_small(program, block)
        near = [cache.window for cache in caches]
        whole = [cache for cache, window in zip(caches, near, strict=True) if window is None]
        layers = [program.states[cache.names[0]].layer for cache in whole]
        if windows is not None:
            _check_text(
                options, budget, [program.states[cache.names[0]] for cache in whole], windows
            )
        by_cache = BUDGETS.find(options.layers)(
            {
                **{"program": program, "caches": whole, "windows": windows, "layers": layers},
                **{"budget": budget, "block": block, "sinks": sinks, "recent": recent},
                "context": program.info.context,
            }
        )
        if len(whole) < len(caches):
            chosen = iter(by_cache or [budget] * len(whole))
            longest = (program.info.context - block) // block * block
            by_cache = [
                next(chosen)
                if window is None
                else max(block, min(_whole(window - 1, block), longest))
                for window in near
            ]
        own = score.tuned(options.tuning)
        made = cls(options, record, score, own, sinks, recent, tuple(by_cache))
        made._check(program)
        return made

    def _check(self, program: Program) -> None:
        options, context = self.options, program.info.context
        budget, block, refuse = self.record.budget, self.record.block, options.refuse
        refuse(
            self.asks_opening
            and (not options.opening <= min(self.recent, block) or budget == block),
            f"opening={options.opening}: the queries of so many first tokens are kept when the "
            f"first of several blocks ends, and asked in the place of as many last rows, which "
            f"stay: expected at most recent={self.recent} and block={block}, and "
            f"budget={budget} above",
        )
        refuse(
            self.asks_opening and not self.turned,
            f"method={options.method!r} turns queries to a text's end, which only "
            f"positions='cache' tells",
        )
        refuse(
            self.most + block > context,
            f"budget={self.most} and a block of {block} are more than the model's context of "
            f"{context}: the cache would never be full",
        )
        options.refuse_other(program)


def _whole(rows: int, block: int) -> int:
    """Rows of so many whole blocks that there is room for these."""
    return -(-rows // block) * block


def _check_text(
    options: EvictCache, budget: int, keys: Sequence[State], windows: torch.Tensor
) -> None:
    """Errors: `PassError` where text cannot tell a layer's heads apart."""
    what, score = f"layers={options.layers!r}", BUDGETS.find(options.layers).score
    joined = [state.name for state in keys if state.type.dims[1] != 1]
    options.refuse(
        bool(joined),
        f"{what} shares rows among caches of heads, and {', '.join(joined[:3])} have several heads "
        f"each: run split_heads before",
    )
    if score is not None:
        options.refuse(
            options.method != score.name,
            f"{what} asks what queries look at, as method={score.name!r} does, got "
            f"{options.method!r}",
        )
    options.refuse(
        windows.shape[1] <= budget,
        f"windows of {windows.shape[1]} tokens hold no more than budget={budget} rows: "
        f"nothing would be chosen among; set length, or a smaller budget",
    )


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

    def _turned(self, write: Written, taken: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
        """Keys as the rotation would have made them at their new places."""
        wrong = "" if _is_rotated(write.keys.new) else "not what a rotation gives"
        wrong = "stored in few bits" if write.how else wrong
        self.refuse(
            bool(wrong),
            f"positions='cache' turns keys to their new places, and those of {write.what} are "
            f"{wrong}: use positions='absolute'",
        )
        cos, sin, inner = self._tables(write, write.keys.new, "positions='cache'")
        return self.fn.call(G.turn_rows.default, taken, rows, cos, sin, interleaved=inner)

    def _rotation(
        self, write: Written, what: str, reach: int
    ) -> tuple[torch.fx.Node | None, torch.fx.Node | None, bool]:
        """The tables of what rotates queries, and how; none where nothing does. what: wants so many
        positions of them."""
        asked = write.attend.args[0]
        self.refuse(
            _is_rotated(write.keys.new) and not _is_rotated(asked),
            f"the queries of {write.what} are not what a rotation gives, and its keys are: where "
            f"queries will look is not known",
        )
        if not _is_rotated(asked):
            return None, None, False
        cos, sin, inner = self._tables(write, asked, what)
        known = int(str(type_of(cos).dims[0]))
        self.refuse(
            reach > known,
            f"{what} and block={self.block} look {reach} positions far, and the "
            f"rotations of {write.what} are known for {known}",
        )
        return cos, sin, inner

    def _tables(
        self, write: Written, rotated: Any, what: str
    ) -> tuple[torch.fx.Node, torch.fx.Node, bool]:
        """The tables of a rotation's angles, one row a position. what: wants them."""
        rotation = Rotation.of(rotated)
        if rotation is None:
            raise PassError(
                f"evict_cache: {what} needs the angles of {write.what} as tables: run the pass "
                f"tabulate_positions before, or leave the option out"
            )
        cos, sin = rotation.tables(self.fn, self.program)
        return cos, sin, rotation.interleaved

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
