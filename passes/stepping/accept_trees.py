"""Let a cached step take token trees and not only chains.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T], past: i64[B], ...) {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)

After::

    func step(tokens: i64[B,T], positions: i64[B,T], past: i64[B], ..., ancestors: bool[B,T,T]) {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, %ancestors, C)

Row t of ``ancestors`` marks the tokens of the step that token t continues, itself included;
positions count depth. Executables leave the input out for chains (Miao et al., SpecInfer, 2024).
Recurrences of a step take them likewise (Wu et al., STree, 2025). Applies to every function with a
cache. Refuses functions that take ancestors already.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...ir import Function, Program, arguments
from ...ir.plan.inputs import ANCESTORS, INPUTS
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import edit_each

G = torch.ops.graftwork


@register
class AcceptTrees(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"trees"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.CACHE_LAYOUT})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _branch)


def branched(fn: Function) -> Function:
    """A copy of a cached function that takes ancestors, or the function if it does already."""
    copy = fn.copy()
    return copy if isinstance(_branch(copy), int) else fn


def _branch(fn: Function) -> int | str:
    takers = [node for node in fn.calls() if _takes_none(node)]
    if not takers or fn.has_input(ANCESTORS):
        return "no function has a step_mask or a recurrence without ancestors"
    ancestors = fn.add_input(ANCESTORS, INPUTS[ANCESTORS].type)
    for node in takers:
        node.update_arg(list(arguments(node)).index(ANCESTORS), ancestors)
    return len(takers)


def _takes_none(node: torch.fx.Node) -> bool:
    """Whether a call could be told who continues whom, and is not."""
    if getattr(node.target, "namespace", None) != "graftwork":
        return False
    return arguments(node).get(ANCESTORS, node) is None
