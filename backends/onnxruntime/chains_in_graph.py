"""Chains drafted inside a graph: for each record that can, what its drafter does, as ONNX nodes.

A chain may be anything: the step verifies it, and it changes no token. So length policies, which
decide how much of a draft is worth its time, are left to the loop's caller, who has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as oir

from ...ir import Program
from ...ir.plan import DraftRecord, FusedDraft, HeadsDraft, NoDraft, SuffixDraft
from .graph_builder import GraphBuilder

Call = Callable[[str, Mapping[str, oir.Value]], Mapping[str, oir.Value]]
"""Puts a function of the program into the graph: its outputs for its inputs."""


@dataclass(frozen=True)
class Stepped:
    """What a drafter may look at: the text i64[L] up to the last committed token; the step's
    outputs; and the column i64[] of the last of its tokens that was kept."""

    text: oir.Value
    outputs: Mapping[str, oir.Value]
    column: oir.Value
    call: Call


Drafting = Callable[[GraphBuilder, Any, Program, Stepped], oir.Value]


def no_chain(g: GraphBuilder, record: NoDraft, program: Program, step: Stepped) -> oir.Value:
    """Nothing."""
    return g.const([])


def copied(g: GraphBuilder, record: SuffixDraft, program: Program, step: Stepped) -> oir.Value:
    """What followed the most recent of the longest earlier matches of the text's end, see
    `runtime.speculate.drafters.suffix`: all places and all lengths at once."""
    text, zero, one = step.text, g.const(0), g.const(1)
    length = g.size(text, 0)
    last = g.op("Sub", length, one)
    back = g.range(zero, g.const(record.longest))
    ends = g.range(zero, last)
    places = g.op("Sub", g.op("Unsqueeze", ends, g.const([1])), back)
    theirs = g.op("Gather", text, g.op("Max", places, zero))
    ours = g.op("Gather", text, g.op("Max", g.op("Sub", last, back), zero))
    alike = g.op("And", g.op("Equal", theirs, ours), g.op("GreaterOrEqual", places, zero))
    sizes = g.total(g.leading(alike, 1), 1)
    best = g.op("ReduceMax", sizes, keepdims=0)
    place = g.op("ArgMax", sizes, axis=0, keepdims=0, select_last_index=1)
    start = g.op("Add", place, one)
    count = g.op("Sub", length, start)
    turn = g.op("Mod", g.range(zero, g.const(record.tokens)), count)
    chain = g.op("Gather", text, g.op("Add", start, turn))
    enough = g.op("GreaterOrEqual", best, g.const(record.shortest))
    found: oir.Value = g.slice(chain, None, g.op("Where", enough, g.const(record.tokens), zero))
    return found


def by_heads(g: GraphBuilder, record: HeadsDraft, program: Program, step: Stepped) -> oir.Value:
    """The best candidate of each head."""
    hidden = g.op("Gather", step.outputs["hidden"], g.vector(step.column), axis=1)
    made = step.call(record.function, {"hidden": hidden})["draft_tokens"]
    depth = program.plan.tree.most
    best = g.op("Gather", made, g.const(0), axis=3)
    chain = g.op("Reshape", best, g.const([-1]))
    found: oir.Value = g.slice(chain, None, g.const(record.levels if depth is None else depth))
    return found


def in_the_step(g: GraphBuilder, record: FusedDraft, program: Program, step: Stepped) -> oir.Value:
    """What the step has made, if it goes on from the last token that was kept."""
    made = g.op("Reshape", step.outputs["drafted"], g.const([-1]))
    place = g.op("Gather", made, g.const(0))
    count = g.op("Where", g.op("Equal", place, step.column), g.const(1 + record.levels), g.const(1))
    found: oir.Value = g.slice(made, g.const(1), count)
    return found


CHAINS: Mapping[type[DraftRecord], Drafting] = {
    NoDraft: no_chain,
    SuffixDraft: copied,
    HeadsDraft: by_heads,
    FusedDraft: in_the_step,
}
"""By record; `SuffixDraft` serves copyspec and prompt lookup."""
