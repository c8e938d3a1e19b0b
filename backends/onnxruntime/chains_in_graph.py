"""Chains drafted inside a graph: for each record that can, what its drafter does, as ONNX nodes.

A chain may be anything: the step verifies it, and it changes no token. So length policies, which
decide how much of a draft is worth its time, are left to the loop's caller, who has none. A
method's chain stands in `loop.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as oir

from ...ir.plan import DecodePlan, DraftRecord, FusedDraft, HeadsDraft, NoDraft
from ...ir.support.discovery import LOOP, import_methods
from .graph_builder import GraphBuilder
from .steps_in_graph import Functions, Values

Given = Callable[[GraphBuilder, oir.Value, oir.Value, oir.Value], Values]
"""Inputs of functions that are fed tokens i64[B,T] behind rows i64[B], choosing at columns."""


@dataclass(frozen=True)
class Stepped:
    """What a drafter may look at: the text i64[L] up to the last committed token; the source i64[R]
    that it is written from, where it is one of the same vocabulary; the column i64[] of the last of
    the step's tokens that was kept; how many tokens there is room for, i64[]; all values after the
    step: states, and outputs of its; and the program's functions."""

    text: oir.Value
    source: oir.Value | None
    column: oir.Value
    room: oir.Value
    values: Values
    functions: Functions
    given: Given


Drafting = Callable[[GraphBuilder, Any, Stepped], tuple[oir.Value, Values]]
"""From a record and a step to the next chain, i64[D], of which as much is taken as there is room
for; and the values then."""


@dataclass(frozen=True)
class Chain:
    """How a drafter drafts in a loop.

    leads: the first parts of a step, through which it has fed its tokens already. genai: its
    settings in onnxruntime-genai's configuration, None where that has no such drafter.
    """

    draft: Drafting
    leads: Callable[[DecodePlan], tuple[str, ...]] = lambda plan: ()
    genai: Callable[[Any], dict[str, Any]] | None = None


CHAINS: dict[type[DraftRecord], Chain] = {}
"""By record."""


def chain(record: type[DraftRecord], **more: Any) -> Callable[[Drafting], Drafting]:
    """Decorator: the function drafts for a record. more: see `Chain`."""

    def enter(function: Drafting) -> Drafting:
        CHAINS[record] = Chain(function, **more)
        return function

    return enter


def chain_of(record: DraftRecord) -> Chain | None:
    """How a drafter drafts in a loop; None where it cannot."""
    import_methods(LOOP)
    return CHAINS.get(type(record))


@chain(NoDraft)
def no_chain(g: GraphBuilder, record: NoDraft, step: Stepped) -> tuple[oir.Value, Values]:
    """Nothing."""
    return g.none_of(step.text), step.values


@chain(HeadsDraft)
def by_heads(g: GraphBuilder, record: HeadsDraft, step: Stepped) -> tuple[oir.Value, Values]:
    """The best candidate of each head."""
    hidden = g.op("Gather", step.values["hidden"], g.vector(step.column), axis=1)
    made = step.functions.call(g, record.function, {"hidden": hidden})["draft_tokens"]
    depth = step.functions.program.plan.tree.most
    best = g.op("Gather", made, g.const(0), axis=3)
    chain = g.op("Reshape", best, g.const([-1]))
    return g.slice(chain, None, g.const(record.levels if depth is None else depth)), step.values


@chain(FusedDraft)
def in_the_step(g: GraphBuilder, record: FusedDraft, step: Stepped) -> tuple[oir.Value, Values]:
    """What the step has made, if it goes on from the last token that was kept."""
    made = g.op("Reshape", step.values["drafted"], g.const([-1]))
    place = g.op("Gather", made, g.const(0))
    count = g.op("Where", g.op("Equal", place, step.column), g.const(1 + record.levels), g.const(1))
    return g.slice(made, g.const(1), count), step.values
