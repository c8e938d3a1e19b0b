"""Let attention read the chunks of a cache whose landmarks count, and the latest rows.

Before, of each layer::

    func step(..., past: i64[B], kv.3.key: f32[B,G,C,64], kv.3.value: f32[B,G,C,64]) -> ... {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.3.key, %k, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (rows 256, chunk 8, block 64)::

    state kv.3.marks: f32[B,G,C.2,64]
      %r: i64[B,G,T,320] = graftwork.chunk_rows(%q, %kv.3.marks, %m, %past, chunks=32, chunk=8,
          block=64, latest=64, scale=0.125)
      %y: f32[B,H,T,64] = graftwork.attend_rows(%q, %kw, %vw, %r, scale=0.125)

    upkeep func mark(past: i64[B], kv.3.key: f32[B,G,C,64], kv.3.marks: f32[B,G,C.2,64], ...) {
      %n: f32[B,G,8,64] = graftwork.chunk_means(%kv.3.key, %past, block=64, chunk=8)
      %s: f32[B,G,C.2,64] = graftwork.store_rows(%kv.3.marks, %n, %past, after=64, each=8)
    decode {
      cache = marked(function="mark", block=64, chunk=8, groups="C.2")

A chunk's landmark is the mean of its keys, and made where a text ends a block: a step reads
landmarks, one for `chunk` rows, and the rows of the chunks that it picks. Rows since the last whole
block are read in any case. Every token picks for itself, so drafts and batches change nothing.
Prompts run through the function that there was, which reads all rows (prefill "full"), or as what
is generated does ("same").

Source: Sun et al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference"
(2024). Refuses what `read_sparse` does, and sliding windows and chunks, where a token does not see
all rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ...ir import Function, Program, State, Sym, TensorType, arguments
from ...ir.plan import MarkChunks
from ...ir.plan.bounds import Context, Rank
from ..engine.base import Outcome
from ..engine.plan_edits import Prompts
from ..policies import builds
from .cached_rows import Written, reach_of, unbounded, written
from .contents import RecordedContents, upkeep
from .picked_rows import attend_rows, check_sparse, prompts_apart

G = torch.ops.graftwork


@builds(MarkChunks)
class ReadChunks(RecordedContents):
    """rows: that a token reads of whole blocks, so many chunks as they make. chunk: rows that share
    a landmark. block: rows that come before they get landmarks. full: first layers that read all
    rows. prefill: as of `read_sparse`."""

    rows: Context = 256
    full: Rank = 0
    prefill: Prompts = "full"

    name: ClassVar[str] = "read_chunks"

    def run(self, program: Program) -> Outcome:
        caches = unbounded(program.step, program)[self.full :]
        if not caches:
            return Outcome(program, 0, f"no attention of {program.step.name} is left to read fewer")
        record: MarkChunks = self.made()
        self._check(program, record)
        marks = {cache.keys.names[0]: _marks(program, cache, record.groups) for cache in caches}
        program, whole = prompts_apart(program, self.name, self.prefill)
        functions = {
            name: fn if name == whole else self._edited(fn.copy(), program, marks, record)
            for name, fn in program.functions.items()
        }
        mark = _mark(program, marks, record)
        functions[mark.name] = mark
        states = {**program.states, **{state.name: state for state in marks.values()}}
        plan = replace(program.plan, cache=replace(record, function=mark.name))
        made = program.replace(functions=functions, states=states, plan=plan)
        return Outcome(made, len(marks))

    def _check(self, program: Program, record: MarkChunks) -> None:
        self.refuse_other(program)
        self.refuse_small(program, record.block)
        self.refuse(
            self.rows % record.chunk != 0,
            f"rows={self.rows} and chunk={record.chunk}: expected rows of whole chunks",
        )
        self.refuse(
            record.block > program.info.context,
            f"block={record.block} is more than the model's context of {program.info.context}: "
            f"no chunk would ever get a landmark",
        )

    def _edited(
        self, fn: Function, program: Program, marks: dict[str, State], record: MarkChunks
    ) -> Function:
        """The function, changed where it reads a cache that has landmarks."""
        for write in list(written(fn, program)):
            state = marks.get(write.keys.names[0])
            if state is None:
                continue
            check_sparse(self.name, write)
            given = arguments(write.attend)
            near = reach_of(given["mask"])
            self.refuse(
                bool(near),
                f"{write.what} looks back over {near}, and chunks are picked among all rows",
            )
            kept = fn.add_input(state.name, state.type)
            with fn.graph.inserting_before(write.attend):
                rows = fn.call(
                    G.chunk_rows.default,
                    *(given["q"], kept, given["mask"], fn.input("past")),
                    chunks=self.rows // record.chunk,
                    chunk=record.chunk,
                    block=record.block,
                    # A tree has more nodes than levels: they may lie beyond the block's end.
                    latest=record.block + program.plan.columns,
                    **write.options,
                )
                attend_rows(write, rows)
        return fn


def _marks(program: Program, cache: Written, groups: str) -> State:
    """The state of a layer's landmarks."""
    keys = program.states[cache.keys.names[0]]
    batch, heads, _, width = keys.type.dims
    type = TensorType(torch.float32, (batch, heads, Sym(groups), width))
    return State(f"{keys.name.rpartition('.key')[0]}.marks", type, keys.layer, "marks")


def _mark(program: Program, marks: dict[str, State], record: MarkChunks) -> Function:
    """The function that gives the last block's chunks their landmarks."""
    fn, block, chunk = upkeep(program, "mark"), record.block, record.chunk
    past, made = fn.input("past"), {}
    for key, state in marks.items():
        keys = fn.add_input(key, program.states[key].type)
        kept = fn.add_input(state.name, state.type)
        means = fn.call(G.chunk_means.default, keys, past, block=block, chunk=chunk)
        made[state.name] = fn.call(G.store_rows.default, kept, means, past, after=block, each=chunk)
    fn.set_outputs(made)
    return fn
