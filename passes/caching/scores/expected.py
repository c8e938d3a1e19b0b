"""Rows that queries to come are expected to look at, by how long their values are.

Source: Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future
Queries Distribution" (2025).
"""

from torch import Tensor

from .base import G, row_score


@row_score(sinks=4)
def expected(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    past: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    block: int,
    sinks: int,
    ahead: int,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """Attention of normal queries with the mean and covariance of the last block's, times a value's
    length."""
    how = {"block": block, "ahead": ahead, "interleaved": interleaved}
    asked: Tensor = G.expected_queries(queries, cos, sin, **how)
    given = G.expected_attention(asked, keys, values, past, sinks=sinks, scale=scale)
    scores: Tensor = G.row_scores_attention(given, past)
    return scores
