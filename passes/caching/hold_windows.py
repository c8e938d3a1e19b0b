"""Let layers that look back over a sliding window hold the rows that it reaches, and no more.

Before (window 512)::

    state kv.0.key: f32[B,G,C,D] ...
    func step(..., past: i64[B], kv.0.key, ...) -> ... {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C, window=512)

After (block 256), as `evict_cache` makes it with a budget that no text fills, where such layers
have one of their own::

    state kv.0.key: f32[B,G,C.2,D] ...
      %m: bool[B,1,T,C.2] = graftwork.step_mask(%r, %p, None, C.2, window=512)
    decode {
      cache = evict(function="evict", budget=32512, block=256, always=True, capacities=("C.2",),
          budgets=(512,), ...)

What tokens see is the same; what is saved is memory. No step and no piece of a prompt goes beyond
the end of a block, where rows are dropped.
Source: the rolling buffer of Jiang et al., "Mistral 7B" (2023).

Refuses what `evict_cache` refuses.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...ir import Program
from ...ir.plan.bounds import Nodes
from ...ir.plan.contract import Contract
from ..engine.base import Outcome, register
from .cached_rows import written
from .contents import CacheContents
from .evict_cache import EvictCache
from .scores.window import window


@register
class HoldWindows(CacheContents):
    """block: rows after which rows are dropped, and tokens that are run at once at most."""

    block: Nodes = 256

    contract: ClassVar[Contract] = Contract.EXACT
    reads = EvictCache.reads

    def run(self, program: Program) -> Outcome:
        if all(write.window is None for write in written(program.step, program)):
            return Outcome(program, 0, "no layer looks back over a sliding window")
        block = min(self.block, program.info.context // 2)
        budget = (program.info.context - block) // block * block
        how: dict[str, Any] = {"budget": budget, "block": block, "sinks": 0}
        made = EvictCache(method=window.name, **how)
        return made.evicted(program, None, windows_alone=True)
