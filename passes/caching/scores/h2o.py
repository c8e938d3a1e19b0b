"""Rows that all queries so far looked at, half of the budget; the latest rows are the rest.

Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models" (2023).
"""

from torch import Tensor

from .base import G, row_score


@row_score(recent=0.5)
def h2o(
    queries: Tensor,
    keys: Tensor,
    past: Tensor,
    sums: Tensor,
    *,
    block: int,
    attention: dict[str, float],
) -> tuple[Tensor, Tensor]:
    """All the attention that a row got: the block's queries add to what it was given before."""
    given = G.row_attention(queries, keys, past, block=block, last=block, **attention)
    sums = G.row_sums(sums, given, past, count=block)
    return G.row_scores_attention(sums.squeeze(-1), past), sums
