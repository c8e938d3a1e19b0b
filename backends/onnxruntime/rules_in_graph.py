"""What a checkpoint's generation config forbids or forces, inside a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as oir

from ...ir.plan.defaults import Defaults
from .graph_builder import GraphBuilder


class Rules:
    """Tokens that never come, or not as the first new one; and what a text's second token is where
    it begins with one, and its last where it is full. See `ir.defaults.Defaults`."""

    def __init__(self, defaults: Defaults, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.never = list(defaults.suppress_tokens)
        self.not_first = list(defaults.begin_suppress_tokens)
        self.first, self.last = defaults.forced_bos_token_id, defaults.forced_eos_token_id

    @property
    def forbid(self) -> bool:
        """Whether the likeliest token may be one that must not come."""
        return bool(self.never or self.not_first)

    def allowed(self, g: GraphBuilder, logits: oir.Value, begins: oir.Value) -> oir.Value:
        """Logits [...,V] of tokens that may come, others' -inf. begins: bool[], whether they are
        those of the first new token."""
        if self.never:
            logits = g.op("Where", self._flags(g, self.never), self._nothing(g, logits), logits)
        if self.not_first:
            barred = g.op("And", self._flags(g, self.not_first), begins)
            logits = g.op("Where", barred, self._nothing(g, logits), logits)
        return logits

    def _flags(self, g: GraphBuilder, tokens: list[int]) -> oir.Value:
        flags = np.zeros(self.vocabulary, np.bool_)
        flags[tokens] = True
        return g.const(flags, np.bool_)

    def _nothing(self, g: GraphBuilder, logits: oir.Value) -> oir.Value:
        lowest: oir.Value = g.op("CastLike", g.const(-np.inf, np.float32), logits)
        return lowest

    def begun(self, g: GraphBuilder, tokens: oir.Value, begins: oir.Value, size: oir.Value) -> Any:
        """Tokens i64[...] where `begins` says that they are first ones, behind `size` i64[]."""
        if self.first is None:
            return tokens
        forced = g.op("And", begins, g.op("Equal", size, g.const(1)))
        return g.op("Where", forced, g.const(self.first), tokens)

    def ended(self, g: GraphBuilder, tokens: oir.Value, full: oir.Value) -> Any:
        """Tokens i64[...] where `full` says which of them are last ones."""
        return tokens if self.last is None else g.op("Where", full, g.const(self.last), tokens)
