"""Keep the rows of caches as whole numbers of few bits, but for the latest.

Before::

    state kv.0.key: f32[B,G,C,64] ...
    func step(..., past: i64[B], kv.0.key, kv.0.value) -> logits, kv.0.key, kv.0.value {
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.0.key, %k, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (bits 2)::

    state kv.0.key.codes: u8[B,G,C,16], kv.0.key.steps: f16[B,G,C.2,128]
    state kv.0.key.recent: f32[B,G,C.1,64] ...
    func step(..., past, kv.0.key.codes, kv.0.key.steps, kv.0.key.recent, ...) -> ... {
      %r: i64[B] = aten.minimum(%past, aten.add.Scalar(aten.remainder.Scalar(%past, 64), 128))
      %kr: f32[B,G,C.1,64] = graftwork.cache_write(%kv.0.key.recent, %k, %r)
      %y: f32[B,H,T,64] = graftwork.attend_grouped(%q, %kv.0.key.codes, %kv.0.key.steps, %kr, ...,
          %past, %m, bits=2, group=32, keys_by_channel=True, residual=128, block=64, scale=0.125)

    upkeep func store(past, kv.0.key.codes, ...) -> kv.0.key.codes, ...   # oldest rows to codes
    decode {
      cache = store(function="store", residual=128, block=64, ...)

Where a text ends a block, the oldest `block` of more than `residual` float rows get codes, once and
for good: steps never do that, so what they write is taken back as ever, and drafts change nothing
of what the model says. Attention reads the codes where they lie. `stored_form` says what rows may
be beside codes of groups.

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

from ...ir import Function, PassError, Program, State, Sym, TensorType, arguments, site_of
from ...ir.ops.grouped_cache import whole_bytes
from ...ir.plan import StoreOld
from ..engine.base import Outcome
from ..policies import builds
from .cached_rows import scored
from .contents import RecordedContents, upkeep
from .exchange import beside, cached_states, exchange, exchanged
from .layer_budgets import rows_before
from .rotation import Rotation
from .stored_form import CODES, LEFT, RECENT, RIGHT, STEPS, StoredForm, bits_remark

A, G = torch.ops.aten, torch.ops.graftwork
Node = torch.fx.Node
LATEST, GROUPS = "C.1", "C.2"


@builds(StoreOld)
class QuantizeOldRows(RecordedContents):
    """residual, block, group: see the record; `group` numbers share a step. bits: of one. keys,
    values: whether numbers of a "channel" share steps, from row to row, or of a "row", from channel
    to channel. outliers: numbers of each group that are kept as they are, beside its step. rank: of
    what is kept of the codes' errors, for every `group` rows. turned: whether rows are turned by a
    Hadamard matrix first. unrotated: whether keys are stored as they were before their rotation by
    position, and rotated when they are read."""

    bits: Literal[2, 3, 4, 8] = 4
    keys: Literal["channel", "row"] = "channel"
    values: Literal["channel", "row"] = "row"
    outliers: Annotated[int, Field(ge=0, le=8)] = 0
    rank: Annotated[int, Field(ge=0, le=16)] = 0
    turned: bool = False
    unrotated: bool = False

    name: ClassVar[str] = "quantize_old_rows"

    def run(self, program: Program) -> Outcome:
        record: StoreOld = self.made()
        self._check(program, record)
        # A draft's own cache, where the step makes the draft, stays as it is, and so does what is
        # made of a source: no row of that is older than another.
        read = {name for name in cached_states(program) if program.step.has_input(name)}
        wanted = {name for name in read if program.states[name].grows}
        if not wanted:
            return Outcome(program, 0, "no attention of the target reads a cache")
        forms = {n: self._form(program, program.states[n], record.group) for n in sorted(wanted)}
        made = {name: _states(program.states[name], form) for name, form in forms.items()}
        states = exchanged(program.states, {n: [*parts.values()] for n, parts in made.items()})
        functions = {
            name: self._read(fn, forms, program, made, record)
            for name, fn in program.functions.items()
        }
        store = self._store(forms, program, made, record)
        functions[store.name] = store
        shared = any(state.capacity == GROUPS for state in states.values())
        record = replace(record, function=store.name, groups=GROUPS if shared else "")
        plan = replace(program.plan, cache=record)
        changed = program.replace(functions=functions, states=states, plan=plan)
        caches = [program.states[name] for name in forms]
        new = [state for parts in made.values() for state in parts.values()]
        coded = [state for state in new if state.capacity != LATEST]
        remark = (
            f"{bits_remark(self.bits, caches, coded, record.group)}; the latest {record.residual} "
            f"rows and up to {record.block - 1} more are floats"
        )
        return Outcome(changed, len(wanted), remarks=(remark,))

    def _check(self, program: Program, record: StoreOld) -> None:
        self.refuse_other(program)
        self.refuse_shared(program)
        self.refuse_small(program, record.block)
        self.refuse(
            record.most_latest > program.info.context,
            f"residual={record.residual} and a block of {record.block} are more than the model's "
            f"context of {program.info.context}: no row would ever get codes",
        )

    def _form(self, program: Program, state: State, group: int) -> StoredForm:
        """How a state's rows are stored. Errors: `PassError` if they cannot be."""
        width, key = state.type.dims[3], state.part == "key"
        by_channel = (self.keys if key else self.values) == "channel"
        each = 1 if by_channel or not isinstance(width, int) else min(group, width)
        what = f"{self.name}: rows of {state.name} are {width} wide; expected"
        if not isinstance(width, int) or not whole_bytes(width, self.bits) or width % each:
            raise PassError(f"{what} whole bytes of {self.bits} bits and whole groups of {group}")
        if self.turned and width & (width - 1):
            raise PassError(f"{what} a power of two, or set turned: false")
        size = group if by_channel else each
        self.refuse(
            self.outliers >= size or self.rank > min(group, width),
            f"outliers={self.outliers} of groups of {size} numbers and rank={self.rank} of {group} "
            f"rows of {width}; expected fewer",
        )
        rotation = None
        if key and self.unrotated:
            rotation = self._rotation(program.step, state)
        return StoredForm(
            self.bits, group, by_channel, self.outliers, self.rank, self.turned, rotation
        )

    def _rotation(self, fn: Function, state: State) -> Rotation:
        writes = [user for user in fn.input(state.name).users if user.op != "output"]
        found = [Rotation.of(write.args[1], fn.input("positions")) for write in writes]
        if len(found) != 1 or found[0] is None:
            raise PassError(
                f"{self.name}: unrotated=true, and {state.name} is not what a rotation by tables "
                f"of the tokens' own positions makes: run tabulate_positions before, or leave the "
                f"option out"
            )
        return found[0]

    def _read(
        self,
        function: Function,
        forms: Mapping[str, StoredForm],
        program: Program,
        made: Mapping[str, Mapping[str, State]],
        record: StoreOld,
    ) -> Function:
        """A function that writes the latest rows, and whose attention reads codes."""
        place: list[Node] = []
        angles: dict[Rotation, list[Node]] = {}

        def write(fn: Function, node: Node, caches: tuple[Node, ...]) -> tuple[Node, ...]:
            given = arguments(node)
            if given["past"] is not fn.input("past"):
                raise PassError(
                    f"{self.name}: %{node.name} of {fn.name} writes {given['cache'].target} "
                    f"elsewhere than behind past: leave out what drafts so, or this pass"
                )
            if not place:
                place.append(rows_before(fn, record.residual, record.block))
            *old, recent = caches
            new = given["new"], place[0]
            return (*old, fn.call(G.cache_write.default, recent, *new, site=site_of(node)))

        def attend(
            fn: Function, node: Node, keys: tuple[Node, ...], values: tuple[Node, ...]
        ) -> Node:
            given, owners = arguments(node), [_owner(rows) for rows in (keys, values)]
            first, second = (forms[owner] for owner in owners)
            rotation = first.rotation
            if rotation is not None and rotation not in angles:
                angles[rotation] = rotation.angles(fn, program, self._places(fn))
            cos, sin = angles[rotation] if rotation is not None else (None, None)
            pairs = zip(owners, (keys, values), strict=True)
            parts = [dict(zip(made[owner], rows, strict=True)) for owner, rows in pairs]
            factors = [part.get(side) for part in parts for side in (LEFT, RIGHT)]
            stored = [part[name] for part in parts for name in (CODES, STEPS, RECENT)]
            how = first.how | scored(node)
            del how["by_channel"]
            how |= {"keys_by_channel": first.by_channel, "values_by_channel": second.by_channel}
            how |= {"residual": record.residual, "block": record.block}
            if self.turned:
                how["turned"] = True
            if rotation is not None and rotation.interleaved:
                how["interleaved"] = True
            return fn.call(
                G.attend_grouped.default,
                *(given["q"], *stored, fn.input("past")),
                *(given[name] for name in ("mask", "bias", "sinks")),
                *(*factors, cos, sin),
                site=site_of(node),
                **how,
            )

        states = {name: [*parts.values()] for name, parts in made.items()}
        return exchange(self.name, function, states, write, attend)

    def _places(self, fn: Function) -> Node:
        """0, 1, 2, ... for all rows of a cache: i64[1,C]."""
        index = fn.call(A.arange.start_step, 0, Sym("C"), 1, dtype=torch.int64)
        return fn.call(A.unsqueeze.default, index, 0)

    def _store(
        self,
        forms: dict[str, StoredForm],
        program: Program,
        made: Mapping[str, Mapping[str, State]],
        record: StoreOld,
    ) -> Function:
        """The function that gives the oldest of the latest rows their codes."""
        fn = upkeep(program, "store")
        past = fn.input("past")
        held = {
            name: {part: fn.add_input(new.name, new.type) for part, new in made[name].items()}
            for name in program.states
            if name in made
        }
        full, block = record.most_latest, record.block
        first = past
        if self.unrotated:
            first = fn.call(A.clamp.default, fn.call(A.sub.Scalar, past, full), 0)
        latest = fn.call(A.arange.start_step, 0, block)
        outputs: dict[str, torch.fx.Node] = {}
        for state, given in held.items():
            oldest = fn.call(A.index_select.default, given[RECENT], 2, latest)
            rows = forms[state].stored(fn, program, oldest, first, block)
            for part, kept in forms[state].store(fn, rows, past, full, given).items():
                outputs[f"{state}.{part}"] = kept
        fn.set_outputs(outputs)
        return fn


def _owner(parts: tuple[Node, ...]) -> str:
    """The name of the state that these stand for."""
    return str(parts[0].target).removesuffix(f".{CODES}")


def _states(state: State, form: StoredForm) -> dict[str, State]:
    """What a state becomes, by part."""
    *outer, _, width = state.type.dims
    parts = form.parts(state.type, GROUPS)
    parts[RECENT] = TensorType(state.type.dtype, (*outer, Sym(LATEST), width))
    return {part: beside(state, part, type) for part, type in parts.items()}
