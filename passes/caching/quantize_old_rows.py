"""Keep the rows of caches as whole numbers of few bits, but for the latest.

Before::

    state kv.0.key: f32[B,G,C,64] ...
    func step(..., past: i64[B], kv.0.key, kv.0.value) -> logits, kv.0.key, kv.0.value {
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.0.key, %k, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (bits 2)::

    state kv.0.key.codes: u8[B,G,C,16], kv.0.key.steps: f32[B,G,C.2,128]
    state kv.0.key.recent: f32[B,G,C.1,64] ...
    func step(..., past, kv.0.key.codes, kv.0.key.steps, kv.0.key.recent, ...) -> ... {
      %r: i64[B] = aten.minimum(%past, aten.add.Scalar(aten.remainder.Scalar(%past, 64), 128))
      %kr: f32[B,G,C.1,64] = graftwork.cache_write(%kv.0.key.recent, %k, %r)
      %kw: f32[B,G,C,64] = graftwork.grouped_rows(%kv.0.key.codes, %kv.0.key.steps, %kr, %past,
          bits=2, group=32, by_channel=True, residual=128, block=64)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

    upkeep func store(past, kv.0.key.codes, ...) -> kv.0.key.codes, ...   # oldest rows to codes
    decode {
      cache = store(function="store", residual=128, block=64, ...)

Where a text ends a block, the oldest `block` of more than `residual` float rows get codes, once and
for good: steps never do that, so what they write is taken back as ever, and drafts change nothing
of what the model says. Attention reads all rows as floats, which are made of the codes in every
step: what is saved is memory.

Refuses caches that something else than attention reads, or that are written elsewhere than behind
`past`; rows and blocks that are no whole groups; a plan with another cache policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, Role, State, Sym, TensorType, site_of
from ...ir.contract import Contract
from ...ir.plan import KeepAll, StoreOld
from ...ir.protocol import INPUTS
from ..engine.base import Effect, Outcome, Pass, register
from .layer_budgets import rows_before
from .quantize_cache import cached_states, erase

A, G = torch.ops.aten, torch.ops.graftwork
CODES, STEPS, RECENT = PARTS = ("codes", "steps", "recent")
LATEST, GROUPS = "C.1", "C.2"

Rows = Annotated[int, Field(ge=1, le=2**20)]


@register
class QuantizeOldRows(Pass):
    """bits: of a number, 2, 4 or 8. group: numbers that share a step. residual: rows that stay
    floats, the latest; block: rows that come before some get codes. keys, values: whether numbers
    of a "channel" share steps, from row to row, or of a "row", from channel to channel."""

    bits: Literal[2, 4, 8] = 4
    group: Rows = 32
    residual: Rows = 128
    block: Rows = 64
    keys: Literal["channel", "row"] = "channel"
    values: Literal["channel", "row"] = "row"

    name: ClassVar[str] = "quantize_old_rows"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_CONTENTS})
    reads: ClassVar[frozenset[Effect]] = frozenset(
        {Effect.CACHE_LAYOUT, Effect.DECODE_PLAN, Effect.FUNCTIONS, Effect.LAYER_SET}
    )

    def run(self, program: Program) -> Outcome:
        """Give old rows codes. See the module docstring."""
        self._check(program)
        # A draft's own cache, where the step makes the draft, stays as it is.
        wanted = {name for name in cached_states(program) if program.step.has_input(name)}
        if not wanted:
            return Outcome(program, 0, "no attention of the target reads a cache")
        states: dict[str, State] = {}
        for name, state in program.states.items():
            made = self._states(state) if name in wanted else [state]
            states.update({each.name: each for each in made})
        functions = {
            name: self._read(fn, wanted, program, states) for name, fn in program.functions.items()
        }
        store = self._store(wanted, program, states)
        functions[store.name] = store
        shared = any(state.capacity == GROUPS for state in states.values())
        groups = GROUPS if shared else ""
        record = StoreOld(store.name, self.residual, self.block, LATEST, groups, self.group)
        plan = replace(program.plan, cache=record)
        changed = program.replace(functions=functions, states=states, plan=plan)
        return Outcome(changed, len(wanted))

    def _check(self, program: Program) -> None:
        plan = program.plan
        draft = plan.columns + 1
        wrong = None
        if not isinstance(plan.cache, KeepAll):
            wrong = f"the plan has cache={plan.cache.brief} already"
        elif self.block % self.group or self.residual % self.block:
            wrong = (
                f"residual={self.residual}, block={self.block} and group={self.group}: expected "
                f"blocks of whole groups, and a residual of whole blocks"
            )
        elif self.block < draft:
            wrong = (
                f"block={self.block} is smaller than a step with a draft, {draft} tokens, which "
                f"may not go beyond the end of a block"
            )
        elif self.residual + self.block > program.info.context:
            wrong = (
                f"residual={self.residual} and a block of {self.block} are more than the model's "
                f"context of {program.info.context}: no row would ever get codes"
            )
        if wrong is not None:
            raise PassError(f"{self.name}: {wrong}")

    def _by_channel(self, state: State) -> bool:
        return (self.keys if state.part == "key" else self.values) == "channel"

    def _states(self, state: State) -> list[State]:
        width, outer = state.type.dims[3], state.type.dims[:2]
        by_channel = self._by_channel(state)
        each = 1 if by_channel or not isinstance(width, int) else min(self.group, width)
        if not isinstance(width, int) or width % (8 // self.bits) or width % each:
            raise PassError(
                f"{self.name}: rows of {state.name} are {width} wide; expected whole bytes of "
                f"{self.bits} bits and whole groups of {self.group}"
            )
        rows = Sym(GROUPS if by_channel else str(state.capacity))
        parts = {
            CODES: TensorType(
                torch.uint8, (*outer, Sym(str(state.capacity)), width * self.bits // 8)
            ),
            STEPS: TensorType(torch.float32, (*outer, rows, 2 * width // each)),
            RECENT: TensorType(state.type.dtype, (*outer, Sym(LATEST), width)),
        }
        return [
            State(f"{state.name}.{part}", type, state.layer, f"{state.part}_{part}")
            for part, type in parts.items()
        ]

    def _how(self, state: State) -> dict[str, Any]:
        return {"bits": self.bits, "group": self.group, "by_channel": self._by_channel(state)}

    def _read(
        self, function: Function, wanted: set[str], program: Program, states: dict[str, State]
    ) -> Function:
        """A function that writes the latest rows, and reads all."""
        own = [str(node.target) for node in function.inputs if str(node.target) in wanted]
        if not own:
            return function
        fn = function.copy()
        place = rows_before(fn, self.residual, self.block)
        outputs = dict(fn.outputs)
        for name in own:
            node = fn.input(name)
            parts = {p: fn.add_input(f"{name}.{p}", states[f"{name}.{p}"].type) for p in PARTS}
            writes = [user for user in node.users if user.op != "output"]
            if len(writes) != 1 or writes[0].target is not G.cache_write.default:
                raise PassError(
                    f"{self.name}: {len(writes)} calls of {fn.name} use {name}; expected one, "
                    f"which writes rows that attention reads"
                )
            (write,) = writes
            if write.args[2] is not fn.input("past"):
                raise PassError(
                    f"{self.name}: %{write.name} of {fn.name} writes {name} elsewhere than behind "
                    f"past: leave out what drafts so, or this pass"
                )
            with fn.graph.inserting_before(write):
                latest = fn.call(
                    G.cache_write.default, parts[RECENT], write.args[1], place, site=site_of(write)
                )
                rows = fn.call(
                    G.grouped_rows.default,
                    *(parts[CODES], parts[STEPS], latest, fn.input("past")),
                    site=site_of(write),
                    **self._how(program.states[name]),
                    residual=self.residual,
                    block=self.block,
                )
            for reader in [user for user in write.users if user.op != "output"]:
                reader.replace_input_with(write, rows)
            del outputs[name]
            outputs[f"{name}.{RECENT}"] = latest
            fn.set_outputs(outputs)
            erase(self.name, fn, write)
            erase(self.name, fn, node)
        return fn

    def _store(self, wanted: set[str], program: Program, states: dict[str, State]) -> Function:
        """The function that gives the oldest of the latest rows their codes."""
        name = "store"
        while name in program.functions:
            name += "_"
        fn = Function(name, role=Role.UPKEEP)
        past = fn.add_input("past", INPUTS["past"].type)
        given = {
            part: fn.add_input(part, states[part].type)
            for state in program.states
            for part in (f"{state}.{p}" for p in PARTS)
            if state in wanted
        }
        full = self.residual + self.block
        zero = fn.call(A.full_like.default, past, 0)
        within = fn.call(A.clamp.default, past, None, full)
        latest = fn.call(A.arange.start_step, 0, full)
        outputs: dict[str, torch.fx.Node] = {}
        for state in (state for n, state in program.states.items() if n in wanted):
            codes, steps, recent = (given[f"{state.name}.{p}"] for p in PARTS)
            how = self._how(state)
            # All that is read of these rows is read at once, before any is written over.
            whole = fn.call(A.index_select.default, recent, 2, latest)
            oldest = fn.call(A.slice.Tensor, whole, 2, 0, self.block)
            made = fn.call(G.quantize_groups.default, oldest, **how)
            each = self.group if how["by_channel"] else 1
            new = [fn.item(made, index) for index in range(2)]
            stored = [
                fn.call(G.store_rows.default, codes, new[0], past, after=full),
                fn.call(G.store_rows.default, steps, new[1], past, after=full, each=each),
            ]
            rows = fn.call(
                G.keep_top.default,
                *(fn.call(G.row_scores_age.default, whole), within),
                rows=self.residual,
                full=full,
                sinks=0,
                recent=0,
            )
            rest = fn.call(G.take_rows.default, whole, rows)
            kept = (*stored, fn.call(G.cache_write.default, recent, rest, zero))
            outputs |= {f"{state.name}.{p}": x for p, x in zip(PARTS, kept, strict=True)}
        fn.set_outputs(outputs)
        return fn
