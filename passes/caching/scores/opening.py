"""Rows that the text's first tokens would look at, were they said again at its end.

Source: Bai et al., "CItruS: Chunked Instruction-aware State Eviction for Long Sequence Modeling"
(2024).
"""

from torch import Tensor

from .base import G, row_score


@row_score(recent=32)
def opening(opening: Tensor, keys: Tensor, past: Tensor, *, attention: dict[str, float]) -> Tensor:
    """The mean attention of the first tokens' queries, in the place of as many last ones."""
    block = last = opening.shape[2]
    given = G.row_attention(opening, keys, past, block=block, last=last, **attention)
    scores: Tensor = G.row_scores_attention(given, past)
    return scores
