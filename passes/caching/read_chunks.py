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

Source: Sun et al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference"
(2024). Refuses what `read_sparse` does, and sliding windows and chunks, where a token does not see
all rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from ...ir import Function, PassError, Program, State, Sym, TensorType, arguments
from ...ir.plan import MarkChunks
from ..engine.base import Effect, Outcome, register
from .cached_rows import Written, reach_of, written
from .contents import CacheContents, upkeep
from .read_sparse import attend_rows, check_sparse

G = torch.ops.graftwork
GROUPS = "C.2"

Rows = Annotated[int, Field(ge=1, le=2**20)]


@register
class ReadChunks(CacheContents):
    """rows: that a token reads of whole blocks, so many chunks as they make. chunk: rows that share
    a landmark. block: rows that come before they get landmarks. full: first layers that read all
    rows."""

    rows: Rows = 256
    chunk: Annotated[int, Field(ge=1, le=4096)] = 8
    block: Annotated[int, Field(ge=1, le=4096)] = 64
    full: Annotated[int, Field(ge=0, le=4096)] = 0

    name: ClassVar[str] = "read_chunks"
    reads: ClassVar[frozenset[Effect]] = CacheContents.reads | {Effect.DECODE_PLAN}

    def run(self, program: Program) -> Outcome:
        """Read what is picked. See the module docstring."""
        caches = list(written(program.step, program))[self.full :]
        if not caches:
            return Outcome(program, 0, f"no attention of {program.step.name} is left to read fewer")
        self._check(program)
        marks = {cache.keys.names[0]: self._marks(program, cache) for cache in caches}
        functions = {
            name: self._edited(fn.copy(), program, marks) for name, fn in program.functions.items()
        }
        mark = self._mark(program, marks)
        functions[mark.name] = mark
        states = {**program.states, **{state.name: state for state in marks.values()}}
        record = MarkChunks(mark.name, self.block, self.chunk, GROUPS)
        plan = replace(program.plan, cache=record)
        made = program.replace(functions=functions, states=states, plan=plan)
        return Outcome(made, len(marks))

    def _check(self, program: Program) -> None:
        self.refuse_other(program)
        self.refuse_small(program, self.block)
        wrong = ""
        if self.block % self.chunk or self.rows % self.chunk:
            wrong = (
                f"rows={self.rows}, block={self.block} and chunk={self.chunk}: expected rows and "
                f"blocks of whole chunks"
            )
        elif self.block > program.info.context:
            wrong = (
                f"block={self.block} is more than the model's context of {program.info.context}: "
                f"no chunk would ever get a landmark"
            )
        self.refuse(bool(wrong), wrong)

    def _marks(self, program: Program, cache: Written) -> State:
        keys = program.states[cache.keys.names[0]]
        batch, heads, _, width = keys.type.dims
        type = TensorType(torch.float32, (batch, heads, Sym(GROUPS), width))
        return State(f"{keys.name.rpartition('.key')[0]}.marks", type, keys.layer, "marks")

    def _edited(self, fn: Function, program: Program, marks: dict[str, State]) -> Function:
        """The function, changed where it reads a cache that has landmarks."""
        for write in list(written(fn, program)):
            state = marks.get(write.keys.names[0])
            if state is None:
                continue
            check_sparse(self.name, write)
            given = arguments(write.attend)
            if near := reach_of(given["mask"]):
                raise PassError(
                    f"{self.name}: {write.what} looks back over {near}, and chunks are picked "
                    f"among all rows"
                )
            kept = fn.add_input(state.name, state.type)
            with fn.graph.inserting_before(write.attend):
                how = write.options
                rows = fn.call(
                    G.chunk_rows.default,
                    *(given["q"], kept, given["mask"], fn.input("past")),
                    chunks=self.rows // self.chunk,
                    chunk=self.chunk,
                    block=self.block,
                    # A tree has more nodes than levels: they may lie beyond the block's end.
                    latest=self.block + program.plan.columns,
                    **how,
                )
                attend_rows(write, rows)
        return fn

    def _mark(self, program: Program, marks: dict[str, State]) -> Function:
        """The function that gives the last block's chunks their landmarks."""
        fn = upkeep(program, "mark")
        past = fn.input("past")
        made = {}
        for key, state in marks.items():
            keys = fn.add_input(key, program.states[key].type)
            kept = fn.add_input(state.name, state.type)
            means = fn.call(G.chunk_means.default, keys, past, block=self.block, chunk=self.chunk)
            made[state.name] = fn.call(
                G.store_rows.default, kept, means, past, after=self.block, each=self.chunk
            )
        fn.set_outputs(made)
        return fn
