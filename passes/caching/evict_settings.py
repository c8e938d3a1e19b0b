"""What the options of `evict_cache` come to for a program, and which it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...ir import PassError, Program
from ...ir.plan import KeepAll
from .cached_rows import Written
from .head_budgets import adaptive
from .head_spans import spans
from .layer_budgets import pyramid
from .row_scores import RowScores

if TYPE_CHECKING:  # settings are made from the options of the pass, which holds none itself
    from .evict_cache import EvictCache


@dataclass(frozen=True)
class Settings:
    """What the options come to for a program."""

    budget: int
    block: int
    sinks: int
    recent: int
    turned: bool
    ahead: int
    opening: int
    by_cache: tuple[int, ...]

    @property
    def most(self) -> int:
        """Rows that the layers keep which keep most."""
        return max(self.by_cache, default=self.budget)

    @classmethod
    def of(
        cls,
        options: EvictCache,
        scores: RowScores,
        program: Program,
        caches: list[Written],
        windows: torch.Tensor | None,
    ) -> Settings:
        """caches: of the step. windows: of text, to find budgets on. Errors: `PassError` for a
        budget that cannot be kept to."""
        budget, block = options.budget, options.block
        share = scores.recent if scores.recent >= 1 else scores.recent * budget
        sinks = scores.sinks if options.sinks < 0 else options.sinks
        recent = int(share) if options.recent < 0 else options.recent
        refuse(
            budget % block != 0,
            f"budget={budget} is no multiple of block={block}: rows are dropped a block at a time",
        )
        refuse(
            sinks + recent >= budget,
            f"budget={budget} leaves no row to choose beside sinks={sinks} and recent={recent}",
        )
        draft = program.plan.columns + 1
        refuse(
            block < draft,
            f"block={block} is smaller than a step with a draft, {draft} tokens, which may not go "
            f"beyond the end of a block",
        )
        refuse(
            options.method == "snapkv" and recent > block,
            f"recent={recent}: snapkv asks the queries of these rows, and those of the last "
            f"block={block} are kept",
        )
        refuse(
            scores.opening and (not options.opening <= min(recent, block) or budget == block),
            f"opening={options.opening}: the queries of so many first tokens are kept when the "
            f"first of several blocks ends, and asked in the place of as many last rows, which "
            f"stay: expected at most recent={recent} and block={block}, and budget={budget} above",
        )
        refuse(
            scores.opening and options.positions != "cache",
            f"method={options.method!r} turns queries to a text's end, which only "
            f"positions='cache' tells",
        )
        context = program.info.context
        by_cache: list[int] = []
        layers = [program.states[cache.names[0]].layer for cache in caches]
        if options.layers == "pyramid":
            always, longest = sinks + recent, context - block
            found = pyramid(budget, len(set(layers)), block, always, longest)
            number = {layer: n for n, layer in enumerate(dict.fromkeys(layers))}
            by_cache = [found[number[layer]] for layer in layers]
        if windows is not None:
            _check_found(options, layers, windows)
            how = {"budget": budget, "block": block, "sinks": sinks}
            if options.layers == "adaptive":
                by_cache = adaptive(program, caches, windows, **how, recent=recent)
            else:
                by_cache = spans(program, caches, windows, **how, longest=context)
        refuse(
            bool(by_cache) and options.positions == "cache",
            f"layers={options.layers!r} has rows end at other places in other layers, and "
            f"positions='cache' takes their place for their position",
        )
        most = max(by_cache, default=budget)
        refuse(
            most + block > context,
            f"budget={most} and a block of {block} are more than the model's context of "
            f"{context}: the cache would never be full",
        )
        refuse(
            not isinstance(program.plan.cache, KeepAll),
            f"the plan has cache={program.plan.cache.brief} already",
        )
        turned = options.positions == "cache"
        return cls(
            budget, block, sinks, recent, turned, options.ahead, options.opening, tuple(by_cache)
        )


FOUND = {"adaptive": "snapkv", "spans": "window"}
"""Ways to find what caches keep on text, and the method that keeps it."""


def _check_found(options: EvictCache, layers: Sequence[int | None], windows: torch.Tensor) -> None:
    """Errors: `PassError` where text cannot tell a layer's caches apart."""
    what, method = f"layers={options.layers!r}", FOUND[options.layers]
    refuse(
        len(set(layers)) == len(layers),
        f"{what} shares rows among caches of heads, and every layer has one cache: run split_heads "
        f"before",
    )
    refuse(
        options.method != method,
        f"{what} asks what queries look at, as method={method!r} does, got {options.method!r}",
    )
    refuse(
        windows.shape[1] <= options.budget,
        f"windows of {windows.shape[1]} tokens hold no more than budget={options.budget} rows: "
        f"nothing would be chosen among; set length, or a smaller budget",
    )


def refuse(wrong: bool, why: str) -> None:
    """Errors: `PassError` in the pass's name, if something is wrong."""
    if wrong:
        raise PassError(f"evict_cache: {why}")
