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
      %s: f32[B,G,C,64] = graftwork.group_values(%kv.0.key.codes, %kv.0.key.steps, bits=2,
          group=32, by_channel=True)
      %kw: f32[B,G,C,64] = graftwork.join_rows(%s, %kr, %past, residual=128, block=64)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

    upkeep func store(past, kv.0.key.codes, ...) -> kv.0.key.codes, ...   # oldest rows to codes
    decode {
      cache = store(function="store", residual=128, block=64, ...)

Where a text ends a block, the oldest `block` of more than `residual` float rows get codes, once and
for good: steps never do that, so what they write is taken back as ever, and drafts change nothing
of what the model says. Attention reads all rows as floats, which are made of the codes in every
step: what is saved is memory. `stored_form` says what rows may be beside codes of groups.

Refuses caches that something else than attention reads, or that are written elsewhere than behind
`past`; rows and blocks that are no whole groups; a plan with another cache policy; `turned` where
rows are no power of two wide, and `unrotated` where keys are not what a rotation by the tokens' own
positions makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, State, Sym, TensorType, site_of
from ...ir.ops.grouped_cache import whole_bytes
from ...ir.plan import StoreOld
from ..engine.base import Effect, Outcome, register
from .contents import CacheContents, upkeep
from .layer_budgets import rows_before
from .quantize_cache import cached_states, erase
from .rotation import Rotation
from .stored_form import StoredForm, bits_remark

A, G = torch.ops.aten, torch.ops.graftwork
RECENT = "recent"
LATEST, GROUPS = "C.1", "C.2"

Rows = Annotated[int, Field(ge=1, le=2**20)]


@register
class QuantizeOldRows(CacheContents):
    """bits: of a number, 2, 3, 4 or 8. group: numbers that share a step. residual: rows that stay
    floats, the latest; block: rows that come before some get codes. keys, values: whether numbers
    of a "channel" share steps, from row to row, or of a "row", from channel to channel.
    outliers: numbers of each group that are kept as they are, beside its step. rank: of what is
    kept of the codes' errors, for every `group` rows. turned: whether rows are turned by a Hadamard
    matrix first. unrotated: whether keys are stored as they were before their rotation by
    position, and rotated when they are read."""

    bits: Literal[2, 3, 4, 8] = 4
    group: Rows = 32
    residual: Rows = 128
    block: Rows = 64
    keys: Literal["channel", "row"] = "channel"
    values: Literal["channel", "row"] = "row"
    outliers: Annotated[int, Field(ge=0, le=8)] = 0
    rank: Annotated[int, Field(ge=0, le=16)] = 0
    turned: bool = False
    unrotated: bool = False

    name: ClassVar[str] = "quantize_old_rows"
    reads: ClassVar[frozenset[Effect]] = CacheContents.reads | {Effect.DECODE_PLAN}

    def run(self, program: Program) -> Outcome:
        """Give old rows codes. See the module docstring."""
        self._check(program)
        # A draft's own cache, where the step makes the draft, stays as it is, and so does what is
        # made of a source: no row of that is older than another.
        read = {name for name in cached_states(program) if program.step.has_input(name)}
        wanted = {name for name in read if program.states[name].grows}
        if not wanted:
            return Outcome(program, 0, "no attention of the target reads a cache")
        forms = {name: self._form(program, program.states[name]) for name in sorted(wanted)}
        states: dict[str, State] = {}
        for name, state in program.states.items():
            made = self._states(state, forms[name]) if name in forms else [state]
            states.update({each.name: each for each in made})
        functions = {
            name: self._read(fn, forms, program, states) for name, fn in program.functions.items()
        }
        store = self._store(forms, program, states)
        functions[store.name] = store
        shared = any(state.capacity == GROUPS for state in states.values())
        groups = GROUPS if shared else ""
        record = StoreOld(store.name, self.residual, self.block, LATEST, groups, self.group)
        plan = replace(program.plan, cache=record)
        changed = program.replace(functions=functions, states=states, plan=plan)
        caches = [program.states[name] for name in forms]
        new = [state for name, state in states.items() if name not in program.states]
        coded = [state for state in new if state.capacity != LATEST]
        remark = (
            f"{bits_remark(self.bits, caches, coded, self.group)}; the latest {self.residual} rows "
            f"and up to {self.block - 1} more are floats"
        )
        return Outcome(changed, len(wanted), remarks=(remark,))

    def _check(self, program: Program) -> None:
        self.refuse_other(program)
        self.refuse_small(program, self.block)
        wrong = ""
        if self.block % self.group or self.residual % self.block:
            wrong = (
                f"residual={self.residual}, block={self.block} and group={self.group}: expected "
                f"blocks of whole groups, and a residual of whole blocks"
            )
        elif self.residual + self.block > program.info.context:
            wrong = (
                f"residual={self.residual} and a block of {self.block} are more than the model's "
                f"context of {program.info.context}: no row would ever get codes"
            )
        self.refuse(bool(wrong), wrong)

    def _form(self, program: Program, state: State) -> StoredForm:
        """How a state's rows are stored. Errors: `PassError` if they cannot be."""
        width, key = state.type.dims[3], state.part == "key"
        by_channel = (self.keys if key else self.values) == "channel"
        each = 1 if by_channel or not isinstance(width, int) else min(self.group, width)
        what = f"{self.name}: rows of {state.name} are {width} wide; expected"
        if not isinstance(width, int) or not whole_bytes(width, self.bits) or width % each:
            raise PassError(
                f"{what} whole bytes of {self.bits} bits and whole groups of {self.group}"
            )
        if self.turned and width & (width - 1):
            raise PassError(f"{what} a power of two, or set turned: false")
        size = self.group if by_channel else each
        if self.outliers >= size or self.rank > min(self.group, width):
            raise PassError(
                f"{self.name}: outliers={self.outliers} of groups of {size} numbers and "
                f"rank={self.rank} of {self.group} rows of {width}; expected fewer"
            )
        rotation = None
        if key and self.unrotated:
            rotation = self._rotation(program.step, state)
        return StoredForm(
            self.bits, self.group, by_channel, self.outliers, self.rank, self.turned, rotation
        )

    def _rotation(self, fn: Function, state: State) -> Rotation:
        writes = [user for user in fn.input(state.name).users if user.op != "output"]
        found = [Rotation.of(fn, write.args[1]) for write in writes]
        if len(found) != 1 or found[0] is None:
            raise PassError(
                f"{self.name}: unrotated=true, and {state.name} is not what a rotation by tables "
                f"of the tokens' own positions makes: run tabulate_positions before, or leave the "
                f"option out"
            )
        return found[0]

    def _states(self, state: State, form: StoredForm) -> list[State]:
        *outer, _, width = state.type.dims
        parts = form.parts(state.type, GROUPS)
        parts[RECENT] = TensorType(state.type.dtype, (*outer, Sym(LATEST), width))
        return [
            State(f"{state.name}.{part}", type, state.layer, f"{state.part}_{part}")
            for part, type in parts.items()
        ]

    def _read(
        self,
        function: Function,
        forms: dict[str, StoredForm],
        program: Program,
        states: dict[str, State],
    ) -> Function:
        """A function that writes the latest rows, and reads all."""
        own = [str(node.target) for node in function.inputs if str(node.target) in forms]
        if not own:
            return function
        fn = function.copy()
        place = rows_before(fn, self.residual, self.block)
        places = self._places(fn) if self.unrotated else None
        outputs = dict(fn.outputs)
        for name in own:
            node = fn.input(name)
            parts = {p: fn.add_input(n, states[n].type) for p, n in _parts(name, states)}
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
                old = forms[name].read(fn, program, parts, places)
                rows = fn.call(
                    G.join_rows.default,
                    *(old, latest, fn.input("past")),
                    site=site_of(write),
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

    def _places(self, fn: Function) -> torch.fx.Node:
        """0, 1, 2, ... for all rows of a cache, at the top of a function: i64[1,C]."""
        with fn.graph.inserting_before(fn.calls()[0]):
            index = fn.call(A.arange.start_step, 0, Sym("C"), 1, dtype=torch.int64)
            return fn.call(A.unsqueeze.default, index, 0)

    def _store(
        self, forms: dict[str, StoredForm], program: Program, states: dict[str, State]
    ) -> Function:
        """The function that gives the oldest of the latest rows their codes."""
        fn = upkeep(program, "store")
        past = fn.input("past")
        own = [state for state in program.states if state in forms]
        for state in own:
            for _, part in _parts(state, states):
                fn.add_input(part, states[part].type)
        full = self.residual + self.block
        zero = fn.call(A.full_like.default, past, 0)
        within = fn.call(A.clamp.default, past, None, full)
        first = zero
        if self.unrotated:
            first = fn.call(A.clamp.default, fn.call(A.sub.Scalar, past, full), 0)
        latest = fn.call(A.arange.start_step, 0, full)
        outputs: dict[str, torch.fx.Node] = {}
        for state in own:
            given = {part: fn.input(name) for part, name in _parts(state, states)}
            # All that is read of these rows is read at once, before any is written over.
            whole = fn.call(A.index_select.default, given[RECENT], 2, latest)
            oldest = fn.call(A.slice.Tensor, whole, 2, 0, self.block)
            made = forms[state].store(fn, program, oldest, first, self.block)
            for part, (new, each) in made.items():
                outputs[f"{state}.{part}"] = fn.call(
                    G.store_rows.default, given[part], new, past, after=full, each=each
                )
            rows = fn.call(
                G.keep_top.default,
                *(fn.call(G.row_scores_age.default, whole), within),
                rows=self.residual,
                full=full,
                sinks=0,
                recent=0,
            )
            rest = fn.call(G.take_rows.default, whole, rows)
            outputs[f"{state}.{RECENT}"] = fn.call(G.cache_write.default, given[RECENT], rest, zero)
        fn.set_outputs(outputs)
        return fn


def _parts(state: str, states: Mapping[str, State]) -> list[tuple[str, str]]:
    """What a state is stored as, and the names of the states for that."""
    before = f"{state}."
    return [(name.removeprefix(before), name) for name in states if name.startswith(before)]
