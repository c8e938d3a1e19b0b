"""Let a cache that drops rows remember what they add up to.

Before, of each layer, in a program whose cache is evicted::

    func step(..., past: i64[B], kv.0.key: f32[B,G,C,D], kv.0.value: f32[B,G,C,E], ...) -> ... {
      %y: f32[B,H,T,E] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)
    upkeep func evict(past: i64[B], kv.0.key, kv.0.value, ...) {
      %k: i64[B,G,1024] = graftwork.keep_top(%s, %past, rows=1024, full=1088, sinks=0, recent=512)

After (rank 8)::

    state kv.0.dropped: f32[B,G,C.2000,E+1] ...
      %p: (f32[B,H,T,E], f32[B,H,T]) = graftwork.attend_part(%q, %kw, %vw, %m, scale=0.125)
      %f: f32[B,H,T,8] = graftwork.positive_features(%q, @kv.0.query_inner, @kv.0.query_outer)
      %r: (f32[B,H,T,E], f32[B,H,T]) = graftwork.read_dropped(%f, %kv.0.dropped, %positions, %past)
      %y: f32[B,H,T,E] = graftwork.merge_parts(%p.0, %p.1, %r.0, %r.1)
    upkeep func evict(..., kv.0.dropped) {
      %o: i64[B,G,64] = graftwork.other_rows(%k, full=1088)
      %g: f32[B,G,64,8] = graftwork.positive_features(<keys of these>, @kv.0.key_inner, ...)
      %d: f32[B,G,8,E+1] = graftwork.add_dropped(%kv.0.dropped, %g, <values of these>, %past,
          full=1088, block=64)

The features are learned on text when the program is made, layer by layer (see `dropped_features`);
the report says how much of the error that dropping makes is left. As long as nothing was dropped,
nothing is added.

Layers that look back over a window miss nothing, and stay as they are.

Refuses caches that drop no rows, that drop other numbers of them in other layers, whose keys are
turned when others go (positions "cache"), or that hold rows in few bits, and text windows that
would not fill them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, State, Sym, TensorType, Weight, arguments, site_of
from ...ir.plan import Evict
from ..engine.base import Effect, Evidence, Length, Outcome, Windows, register
from .cached_rows import Written, read_of, unbounded, written
from .contents import LearnedContents
from .dropped_features import Features, Learned, learned

A, G = torch.ops.aten, torch.ops.graftwork
DROPPED = "C.2000"

Size = Annotated[int, Field(ge=1, le=4096)]


@register
class SumDropped(LearnedContents):
    """rank: features of a query and a key. inner: width of the layers that make them. steps: of
    learning, in each layer. windows, length: of text (see `LearningPass`)."""

    rank: Annotated[int, Field(ge=1, le=64)] = 8
    inner: Size = 64
    steps: Annotated[int, Field(ge=0, le=10**5)] = 200
    windows: Windows = 4
    length: Length = 2048

    reads: ClassVar[frozenset[Effect]] = LearnedContents.reads | {
        Effect.CACHE_CONTENTS,
        Effect.DECODE_PLAN,
    }

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        record, caches = self._checked(program)
        windows = evidence.sampled(self.sample, program)
        full = record.budget + record.block
        self.refuse(
            windows.shape[1] <= full,
            f"windows of {windows.shape[1]} tokens fill no cache of {full} rows: set length, or a "
            f"smaller budget",
        )
        texts = [list(read_of(program, caches, window)) for window in windows]
        how = {"budget": record.budget, "block": record.block, "rank": self.rank}
        found = {
            cache.keys.names[0]: learned(
                [text[n] for text in texts], **how, inner=self.inner, steps=self.steps, seed=n
            )
            for n, cache in enumerate(caches)
        }
        errors = ", ".join(f"{layer.error:.2f}" for layer in found.values())
        made = self._made(program, record, found)
        remark = f"of the squared error that dropping rows makes in attention, by layer: {errors}"
        return Outcome(made, len(found), remarks=(remark,))

    def _checked(self, program: Program) -> tuple[Evict, list[Written]]:
        record = program.plan.cache
        if not isinstance(record, Evict):
            raise PassError(
                f"{self.name}: cache={record.brief} drops no rows: put evict_cache before it"
            )
        self.refuse(bool(record.dropped), "what rows add up to is held already")
        caches = unbounded(program.step, program)  # a window misses nothing
        held = {program.states[cache.keys.names[0]].capacity for cache in caches}
        self.refuse(
            not held.isdisjoint(record.capacities) or record.turned,
            f"cache={record.brief}: expected {record.budget} rows that are left of each layer that "
            f"sees all, and keys that stay as they are (evict_cache.positions=absolute)",
        )
        self.refuse(
            any(cache.how for cache in caches),
            "rows in few bits are read by another kernel, which gives no weight",
        )
        return record, caches

    def _made(self, program: Program, record: Evict, found: Mapping[str, Learned]) -> Program:
        states, weights = dict(program.states), dict[str, Weight]()
        for key, layer in found.items():
            base, keys = key.rpartition(".key")[0], states[key]
            width = states[f"{base}.value"].type.dims[3]
            assert isinstance(width, int)
            type = TensorType(torch.float32, (*keys.type.dims[:2], Sym(DROPPED), width + 1))
            states[f"{base}.dropped"] = State(f"{base}.dropped", type, keys.layer, "dropped")
            for name, tensor in layer.features._asdict().items():
                weights[f"{base}.{name}"] = Weight.of(f"{base}.{name}", tensor)
        functions = {name: fn.copy() for name, fn in program.functions.items()}
        for name, fn in functions.items():
            if name == record.function:
                self._add(fn, list(found), states, weights, record)
            else:
                self._read(fn, program, set(found), states, weights)
        # After a text's first block, too: the sums of the one before it end there.
        every = replace(record, always=True, since=0)
        dropped = replace(every, dropped=DROPPED, dropped_rows=self.rank)
        return program.replace(
            functions=functions,
            states=states,
            weights=program.weights.adding(*weights.values()),
            plan=replace(program.plan, cache=dropped),
        )

    def _add(
        self,
        fn: Function,
        caches: list[str],
        states: Mapping[str, State],
        weights: Mapping[str, Weight],
        record: Evict,
    ) -> None:
        """Let the function that drops rows add them to what earlier ones add up to."""
        taken = {str(n.args[0].target): n.args[1] for n in fn.calls(G.take_rows.default)}  # type: ignore[union-attr]
        outputs, past = dict(fn.outputs), fn.input("past")
        zero = fn.call(A.full_like.default, past, 0)
        for key in caches:
            base = key.rpartition(".key")[0]
            state = fn.add_input(f"{base}.dropped", states[f"{base}.dropped"].type)
            layers = [fn.weight(weights[f"{base}.{n}"]) for n in Features._fields[2:]]
            full = record.budget + record.block
            goes = fn.call(G.other_rows.default, taken[key], full=full)
            held = (fn.input(name) for name in (key, f"{base}.value"))
            keys, values = (fn.call(G.take_rows.default, rows, goes) for rows in held)
            features = fn.call(G.positive_features.default, keys, *layers)
            added = (state, features, values, past)
            made = fn.call(G.add_dropped.default, *added, full=full, block=record.block)
            outputs[f"{base}.dropped"] = fn.call(G.cache_write.default, state, made, zero)
        fn.set_outputs(outputs)

    def _read(
        self,
        fn: Function,
        program: Program,
        keys: set[str],
        states: Mapping[str, State],
        weights: Mapping[str, Weight],
    ) -> None:
        """Let attention over these caches look at what dropped rows add up to, in place."""
        for write in list(written(fn, program)):
            key, given, node = write.keys.names[0], arguments(write.attend), write.attend
            if key not in keys:
                continue
            self.refuse(
                given["mask"].target is not G.step_mask.default,
                f"{write.what} is read through another mask than a step's",
            )
            base, site = key.rpartition(".key")[0], site_of(node)
            options = write.options
            name = f"{base}.dropped"
            state = fn.taking(name, states[name].type)
            with fn.graph.inserting_before(node):
                own = fn.call(G.attend_part.default, *node.args, site=site, **options)
                layers = [fn.weight(weights[f"{base}.{n}"]) for n in Features._fields[:2]]
                features = fn.call(G.positive_features.default, given["q"], *layers, site=site)
                masked = arguments(given["mask"])
                read = fn.call(
                    G.read_dropped.default,
                    *(features, state, masked["positions"], masked["past"]),
                    site=site,
                )
                parts = [fn.item(part, index) for part in (own, read) for index in range(2)]
                if given["q"].meta["type"].dtype != torch.float32:
                    dtype = given["q"].meta["type"].dtype
                    parts[2] = fn.call(A._to_copy.default, parts[2], dtype=dtype)
                merged = fn.call(G.merge_parts.default, *parts, site=site)
            fn.replace(node, merged)
