"""Let the step return the likeliest tokens after each token, best first.

Before::

    func step(...) -> logits f32[B,S,V]

After (count=8)::

    func step(...) -> logits f32[B,S,V], top_tokens i64[B,S,8] {
      %t: (f32[B,S,8], i64[B,S,8]) = aten.topk(%logits, 8)

Drafters that learn from what the target considered read them. Every function that gives the
target's logits returns them: so does the head of a step that is cut. Refuses a program whose step
returns ``top_tokens`` already, and a count beyond the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from pydantic import Field

from ...ir import Function, PassError, Program, site_of
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_each


@register
class AddTopTokens(Pass):
    """count: tokens after each."""

    count: int = Field(default=8, ge=1)

    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    provides: ClassVar[frozenset[str]] = frozenset({"top_tokens"})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})

    def run(self, program: Program) -> Outcome:
        return edit_each(program, partial(self._add, program.info.vocab_size), TARGET)

    def _add(self, vocabulary: int, fn: Function) -> int | str:
        outputs = fn.outputs
        if "top_tokens" in outputs or "logits" not in outputs:
            return f"{fn.name} returns {', '.join(outputs)}"
        if self.count > vocabulary:
            raise PassError(
                f"add_top_tokens: count={self.count} exceeds the vocabulary of {vocabulary} tokens"
            )
        logits = outputs["logits"]
        with fn.graph.inserting_before(fn.output_node):
            found = fn.call(torch.ops.aten.topk.default, logits, self.count, site=site_of(logits))
            best = fn.item(found, 1)
        fn.set_outputs({**outputs, "top_tokens": best})
        return 1
