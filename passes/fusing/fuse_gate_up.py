"""One product for a gated feed-forward block's gate and up projections.

Before::

    %g: f32[B,T,64] = aten.linear(%x, @gate.weight)
    %u: f32[B,T,64] = aten.linear(%x, @up.weight)
    %y: f32[B,T,64] = graftwork.glu(%g, %u, activation="silu")

After::

    %m: f32[B,T,128] = aten.linear(%x, @gate.weight+up.weight)
    %p: (f32[B,T,64], f32[B,T,64]) = aten.split_with_sizes(%m, [64, 64], -1)
    %y: f32[B,T,64] = graftwork.glu(%p[0], %p[1], activation="silu")

with zeros where one has no bias. Leaves alone projections that read different values, have another
dtype, or share a weight with something else.
"""

from __future__ import annotations

from typing import ClassVar

from ...ir import Program
from ..engine.base import STATES, Effect, Outcome, Pass, register
from .products import Merger, merging


@register
class FuseGateUp(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}

    def run(self, program: Program) -> Outcome:
        return merging(program, Merger.merge_gates, "graftwork.glu")
