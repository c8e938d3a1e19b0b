"""Common subexpression elimination: one node where several compute the same value.

Before::

    %a: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %b: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %y: f32[B,1,T,4] = aten.mul.Tensor(%a, %b)

After::

    %a: f32[B,1,T,4] = aten.unsqueeze(%cos, 1)
    %y: f32[B,1,T,4] = aten.mul.Tensor(%a, %a)

Two calls are the same when op, arguments and types of numbers agree (``1`` is not ``1.0``, and
operands in another order count as different). References to one weight become one. Leaves ops
alone that draw random numbers or write to an argument.
"""

from __future__ import annotations

from ...ir import Program
from ...ir.rewrite.cleanup import merge_equal
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each


@register
class Cse(Pass):
    """No options."""

    def run(self, program: Program) -> Outcome:
        return edit_each(program, lambda fn: merge_equal(fn) or "no two calls compute the same")
