"""Rows that the last query looks at, all heads of a layer alike.

Source: Oren et al., "Transformers are Multi-State RNNs" (2024).
"""

from torch import Tensor

from .base import G, row_score


@row_score()
def tova(
    queries: Tensor, keys: Tensor, past: Tensor, *, block: int, attention: dict[str, float]
) -> Tensor:
    """The last query's attention, the mean over all heads: that over the groups' means."""
    given: Tensor = G.row_attention(queries, keys, past, block=block, last=1, **attention)
    same = given.mean(1, keepdim=True).expand(given.shape)
    scores: Tensor = G.row_scores_attention(same, past)
    return scores
