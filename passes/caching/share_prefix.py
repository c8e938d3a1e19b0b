"""Let a batch hold and read the rows once that all its texts begin with.

Before, of each layer::

    func step(..., past: i64[B], kv.0.key: f32[B,2,C,64], kv.0.value: f32[B,2,C,64]) -> ... {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
      %kw: f32[B,2,C,64] = graftwork.cache_write(%kv.0.key, %k, %past)
      %vw: f32[B,2,C,64] = graftwork.cache_write(%kv.0.value, %v, %past)
      %y: f32[B,8,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After: a text's own rows are behind the shared ones, and the queries of all texts are one sequence's
to these::

    state kv.0.key.shared: f32[2,C.1,64] ..., state shared.held: i64[C.1]
      %s: bool[1,1,B*T,C.1] = graftwork.shared_mask(%shared.held, %positions)
      ...
      %p: (f32[B,8,T,64], f32[B,8,T]) = graftwork.attend_part(%q, %kw, %vw, %m, scale=0.125)
      %f: f32[1,8,B*T,64] = aten.reshape(aten.permute(%q, [1, 0, 2, 3]), [1, 8, B*T, 64])
      %r: (f32[1,8,B*T,64], f32[1,8,B*T]) = graftwork.attend_part(%f, %kv.0.key.shared,
          %kv.0.value.shared, %s, scale=0.125)
      %y: f32[B,8,T,64] = graftwork.merge_parts(%p.0, %p.1, ...)
    decode {
      cache = shared(capacity="C.1", held_rows="shared.held")

The rows come from a run of the beginning alone, or of an earlier text (see `runtime/shared`). Where
nothing is shared, as in a batch of one, nothing is held there, and the first number of the state
`shared.held` is 0. All functions that read such a cache read it so.

Refuses programs with recurrences or that write from a source, of which no rows are shared; caches
that lose rows or store them in few bits; attention that weighs rows by their distance (ALiBi).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import (
    Function,
    Program,
    State,
    Sym,
    TensorType,
    arguments,
    site_of,
    type_of,
)
from ...ir.ops.attention import SPANS
from ...ir.plan import KeepShared
from ...ir.plan.contract import Contract
from ..engine.base import Outcome, register
from .cached_rows import scored
from .contents import CacheContents
from .exchange import beside, state_of

A, G = torch.ops.aten, torch.ops.graftwork
OWN_ROWS = (G.attend_part.default, G.cache_read.default)
"""What reads a step's own rows, or has been told of the others."""


@register
class SharePrefix(CacheContents):
    """No options."""

    contract: ClassVar[Contract] = Contract.EXACT

    def run(self, program: Program) -> Outcome:
        plan = program.plan
        self.refuse(program.recurrent, f"{program.name} has recurrences, whose states have no rows")
        self.refuse(
            plan.source.encoder is not None, f"texts of {program.name} have sources of their own"
        )
        self.refuse_other(program)
        self.refuse_shared(program)
        record = KeepShared()
        attends = [n for fn in program.functions.values() for n in fn.calls(G.attend.default)]
        read = {state_of(rows) for node in attends for rows in node.args[1:3]}
        caches = [name for name, state in program.states.items() if name in read and state.grows]
        if not caches:
            return Outcome(program, 0, "no attention reads a cache of rows as they are")
        states = dict(program.states)
        held = TensorType(torch.int64, (Sym(record.capacity),))
        states[record.held_rows] = State(record.held_rows, held, 0, "held")
        for name in caches:
            own = states[name]
            _batch, groups, _, width = own.type.dims
            type = TensorType(own.type.dtype, (groups, Sym(record.capacity), width))
            states[f"{name}.{record.part}"] = beside(own, record.part, type)
        functions = {
            name: _Editor(fn.copy(), states, record, self.refuse).edited()
            for name, fn in program.functions.items()
        }
        made = program.replace(functions=functions, states=states, plan=replace(plan, cache=record))
        return Outcome(made, len(caches))


@dataclass
class _Editor:
    """Edits one function."""

    fn: Function
    states: dict[str, State]
    record: KeepShared
    refuse: Callable[[bool, str], None]
    masks: dict[Any, torch.fx.Node] = field(default_factory=dict)

    def edited(self) -> Function:
        """The function, which reads shared rows wherever it reads a cache's."""
        for node in list(self.fn):
            if node.target is G.attend.default:
                self._attend(node)
        for node in self.fn.inputs:
            state = self.states.get(str(node.target))
            if state is not None and state.grows and not state.together:
                self._check_readers(node, state)
        return self.fn

    def _check_readers(self, rows: torch.fx.Node, state: State) -> None:
        """Whether nothing looks for a text's first rows among its own. Errors: `PassError`."""
        for user in rows.users:
            if user.target is G.cache_write.default and user.args[0] is rows:
                self._check_readers(user, state)
                continue
            self.refuse(
                user.op != "output" and user.target not in OWN_ROWS,
                f"%{user.name} of {self.fn.name} reads {state.name} otherwise than attention over "
                f"rows as they are, and would not find those that texts share",
            )

    def _attend(self, node: torch.fx.Node) -> None:
        """One attention in two parts."""
        fn, given = self.fn, arguments(node)
        names = [state_of(given["k"]), state_of(given["v"])]
        shared = [f"{name}.{self.record.part}" for name in names]
        what = f"%{node.name} of {fn.name}"
        self.refuse(any(n not in self.states for n in shared), f"{what} attends to no cache's rows")
        self.refuse(
            given["bias"] is not None,
            f"{what} weighs rows by their distance (ALiBi, or a table), and rows are held "
            f"elsewhere than their positions say",
        )
        self.refuse(
            given["mask"].target is not G.step_mask.default,
            f"{what} reads a cache through another mask than a step's",
        )
        how = scored(node)
        q, site = given["q"], site_of(node)
        batch, heads, width, _ = type_of(q).dims
        every = batch * width if isinstance(batch, Sym) else width * batch
        own, far = self._masks(given["mask"])
        with fn.graph.inserting_before(node):
            mine = fn.call(
                G.attend_part.default,
                *(q, given["k"], given["v"], own, None, given["sinks"]),
                site=site,
                **how,
            )
            turned = fn.call(A.permute.default, q, [1, 0, 2, 3], site=site)
            flat = fn.call(
                A.reshape.default, turned, [1, heads, every, type_of(q).dims[3]], site=site
            )
            rows = [fn.call(A.unsqueeze.default, self._input(name), 0) for name in shared]
            theirs = fn.call(G.attend_part.default, flat, *rows, far, site=site, **how)
            out, weight = (fn.item(theirs, index) for index in range(2))
            wide = type_of(node).dims[3]
            out = fn.call(A.reshape.default, out, [heads, batch, width, wide], site=site)
            out = fn.call(A.permute.default, out, [1, 0, 2, 3], site=site)
            weight = fn.call(A.reshape.default, weight, [heads, batch, width], site=site)
            weight = fn.call(A.permute.default, weight, [1, 0, 2], site=site)
            parts = fn.item(mine, 0), fn.item(mine, 1), out, weight
            merged = fn.call(G.merge_parts.default, *parts, site=site)
        fn.replace(node, merged)

    def _masks(self, mask: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
        """What tokens see of their own rows, and of the shared ones."""
        fn, given = self.fn, arguments(mask)
        span = {name: given[name] for name in SPANS if given[name] is not None}
        key = given["positions"], *span.items()
        held = self._input(self.record.held_rows)
        with fn.graph.inserting_before(mask):
            if key not in self.masks:
                self.masks[key] = fn.call(G.shared_mask.default, held, given["positions"], **span)
            far = self.masks[key]
            if not span or given["row_positions"] is not None:
                return mask, far
            behind = fn.call(G.positions_behind.default, held, given["past"], given["capacity"])
            mask.args = (*mask.args[:4], behind)
        return mask, far

    def _input(self, name: str) -> torch.fx.Node:
        return self.fn.taking(name, self.states[name].type)
