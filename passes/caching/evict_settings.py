"""What the options of `evict_cache` come to for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...ir import Program, State
from ...ir.plan import Evict
from .budgets.base import BUDGETS
from .cached_rows import Written
from .scores.base import SCORES, RowScore

if TYPE_CHECKING:  # settings are made from the options of the pass, which holds none itself
    from .evict_cache import EvictCache


@dataclass(frozen=True)
class Settings:
    """What the options come to for a program. record: with the budget and the block. score: the
    rule, and `own` its options. sinks, recent: rows that are kept in any case. by_cache: rows of
    each cache; none: all the same."""

    options: EvictCache
    record: Evict
    score: RowScore
    own: dict[str, Any]
    sinks: int
    recent: int
    by_cache: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        """Rows that the layers keep which keep most."""
        return max(self.by_cache, default=self.record.budget)

    @property
    def turned(self) -> bool:
        """Whether keys are turned to their new places."""
        return self.options.positions == "cache"

    @property
    def asks_opening(self) -> bool:
        """Whether the queries of a text's first tokens are kept."""
        return self.score.needs("opening")

    @classmethod
    def of(
        cls,
        options: EvictCache,
        record: Evict,
        program: Program,
        caches: Sequence[Written],
        windows: torch.Tensor | None,
    ) -> Settings:
        """caches: of the step. windows: of text, to find budgets on. Errors: `PassError` for a
        budget that cannot be kept to."""
        score, refuse = SCORES.find(options.method), options.refuse
        budget, block = record.budget, record.block
        share = score.recent if score.recent >= 1 else score.recent * budget
        sinks = score.sinks if options.sinks < 0 else options.sinks
        recent = int(share) if options.recent < 0 else options.recent
        refuse(
            sinks + recent >= budget,
            f"budget={budget} leaves no row to choose beside sinks={sinks} and recent={recent}",
        )
        options.refuse_small(program, block)
        near = [cache.window for cache in caches]
        whole = [cache for cache, window in zip(caches, near, strict=True) if window is None]
        layers = [program.states[cache.names[0]].layer for cache in whole]
        if windows is not None:
            _check_text(
                options, budget, [program.states[cache.names[0]] for cache in whole], windows
            )
        by_cache = BUDGETS.find(options.layers)(
            {
                **{"program": program, "caches": whole, "windows": windows, "layers": layers},
                **{"budget": budget, "block": block, "sinks": sinks, "recent": recent},
                "context": program.info.context,
            }
        )
        if len(whole) < len(caches):
            chosen = iter(by_cache or [budget] * len(whole))
            longest = (program.info.context - block) // block * block
            by_cache = [
                next(chosen)
                if window is None
                else max(block, min(_whole(window - 1, block), longest))
                for window in near
            ]
        own = score.tuned(options.tuning)
        made = cls(options, record, score, own, sinks, recent, tuple(by_cache))
        made._check(program)
        return made

    def _check(self, program: Program) -> None:
        options, context = self.options, program.info.context
        budget, block, refuse = self.record.budget, self.record.block, options.refuse
        refuse(
            self.asks_opening
            and (not options.opening <= min(self.recent, block) or budget == block),
            f"opening={options.opening}: the queries of so many first tokens are kept when the "
            f"first of several blocks ends, and asked in the place of as many last rows, which "
            f"stay: expected at most recent={self.recent} and block={block}, and "
            f"budget={budget} above",
        )
        refuse(
            self.asks_opening and not self.turned,
            f"method={options.method!r} turns queries to a text's end, which only "
            f"positions='cache' tells",
        )
        refuse(
            self.most + block > context,
            f"budget={self.most} and a block of {block} are more than the model's context of "
            f"{context}: the cache would never be full",
        )
        options.refuse_other(program)


def _whole(rows: int, block: int) -> int:
    """Rows of so many whole blocks that there is room for these."""
    return -(-rows // block) * block


def _check_text(
    options: EvictCache, budget: int, keys: Sequence[State], windows: torch.Tensor
) -> None:
    """Errors: `PassError` where text cannot tell a layer's heads apart."""
    what, score = f"layers={options.layers!r}", BUDGETS.find(options.layers).score
    joined = [state.name for state in keys if state.type.dims[1] != 1]
    options.refuse(
        bool(joined),
        f"{what} shares rows among caches of heads, and {', '.join(joined[:3])} have several heads "
        f"each: run split_heads before",
    )
    if score is not None:
        options.refuse(
            options.method != score.name,
            f"{what} asks what queries look at, as method={score.name!r} does, got "
            f"{options.method!r}",
        )
    options.refuse(
        windows.shape[1] <= budget,
        f"windows of {windows.shape[1]} tokens hold no more than budget={budget} rows: "
        f"nothing would be chosen among; set length, or a smaller budget",
    )
