"""Let the step return the greedy choice, so that tokens and not logits leave the device.

Before::

    func step(...) -> logits f32[B,S,V]

After::

    func step(...) -> logits f32[B,S,V], argmax i64[B,S] {
      %a: i64[B,S] = aten.argmax(%logits, -1)

Applies to every function of the target that returns logits. Refuses a program in which all of them
return ``argmax`` already.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...ir import Function, Program, site_of
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_each


@register
class AddArgmax(Pass):
    """No options."""

    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"argmax"})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, _add, TARGET)


def _add(fn: Function) -> int | str:
    outputs = fn.outputs
    if "argmax" in outputs or "logits" not in outputs:
        return f"{fn.name} returns {', '.join(outputs)}"
    logits = outputs.pop("logits")
    with fn.graph.inserting_before(fn.output_node):
        chosen = fn.call(torch.ops.aten.argmax.default, logits, -1, site=site_of(logits))
    fn.set_outputs({"logits": logits, "argmax": chosen, **outputs})
    return 1
