"""One product for an attention's query, key and value.

Before::

    %q: f32[B,T,32] = aten.linear(%x, @q.weight)
    %k: f32[B,T,16] = aten.linear(%x, @k.weight)
    %v: f32[B,T,16] = aten.linear(%x, @v.weight)

After::

    %m: f32[B,T,64] = aten.linear(%x, @q.weight+k.weight+v.weight)
    %p: (f32[B,T,32], f32[B,T,16], f32[B,T,16]) = aten.split_with_sizes(%m, [32, 16, 16], -1)

with %p[0], %p[1], %p[2] for %q, %k, %v, and zeros where one has no bias. Between projection and
attention there may be anything that is made from the projection alone (norms, rotations). Leaves
alone projections that read different values, have another dtype, or share a weight with something
else.
"""

from __future__ import annotations

from typing import ClassVar

from ...ir import Program
from ..engine.base import STATES, Effect, Outcome, Pass, register
from .products import Merger, merging


@register
class FuseQkv(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}

    def run(self, program: Program) -> Outcome:
        return merging(program, Merger.merge_attention, "attention with three projections")
