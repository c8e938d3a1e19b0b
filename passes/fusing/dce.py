"""Dead code elimination: remove calls and weight references that no output needs.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,8] {
      %h: f32[B,T,8] = aten.embedding(@wte, %tokens)
      %unused: f32[B,T,8] = aten.neg(%h)
      return logits=%h

After::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,8] {
      %h: f32[B,T,8] = aten.embedding(@wte, %tokens)
      return logits=%h

Inputs and states stay: they are the function's signature. Other passes call `sweep` on what they
leave behind. Matches nothing where every call is needed.
"""

from __future__ import annotations

from ...ir import Program
from ...ir.rewrite.cleanup import sweep
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each


@register
class Dce(Pass):
    """No options."""

    def run(self, program: Program) -> Outcome:
        return edit_each(program, lambda fn: sweep(fn) or "every call feeds an output")
