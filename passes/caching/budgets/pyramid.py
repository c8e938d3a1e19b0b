"""The first layers keep more rows, and the last ones fewer.

Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import budget_rule


@budget_rule()
def pyramid(
    layers: Sequence[int | None], budget: int, block: int, sinks: int, recent: int, context: int
) -> list[int]:
    """See `falling`."""
    number = {layer: n for n, layer in enumerate(dict.fromkeys(layers))}
    found = falling(budget, len(number), block, sinks + recent, context - block)
    return [found[number[layer]] for layer in layers]


def falling(
    budget: int, layers: int, block: int, always: int, longest: int, steepness: int = 20
) -> list[int]:
    """Rows of each layer, `budget` on average but for rounding to blocks: falling evenly with
    depth, `always` besides, down to a part of 1 / `steepness`.

    No layer keeps more than `longest` rows, which are whole texts: what the first ones do not need,
    the last ones get. Every layer has room for a row that is chosen.
    """
    chosen = budget - always
    last = chosen / steepness
    first = max(min(2 * chosen - last, longest - always), chosen) if layers > 1 else chosen
    fall = 2 * (first - chosen) / max(layers - 1, 1)
    least = always // block * block + block
    rows = [always + first - layer * fall for layer in range(layers)]
    most = max(longest, budget) // block * block
    return [min(max(round(count / block) * block, least), most) for count in rows]
