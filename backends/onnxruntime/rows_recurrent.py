"""The row of recurrences: graftwork's own kernel, where it can be had."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import arguments
from ...ir import type_of as ir_type
from .emit import Emitter, row
from .probe import own_attention_available

G = torch.ops.graftwork


def _is_own(node: torch.fx.Node) -> bool:
    """Whether the kernel, which comes with attention's, can do a step."""
    given = arguments(node)
    floats = [given[name] for name in ("q", "k", "v", "g", "beta")]
    plain = all(x is None or ir_type(x).dtype == torch.float32 for x in floats)
    return plain and not own_attention_available()


@row(G.linear_attention_step.default, when=_is_own, native=True)
def linear_attention_step(e: Emitter, *operands: Any) -> Any:
    state_and_counts, ancestors, sequence, beta = operands[:7], operands[7], operands[8:12], None
    if len(operands) > 12:
        beta = operands[12]
    given = (*state_and_counts, *sequence, ancestors, beta)
    return e.own("LinearAttentionStep", *given, threads=e.threads, outputs=5)
