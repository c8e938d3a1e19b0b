"""The first rows and the latest.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024): 4 sinks.
"""

from torch import Tensor

from .base import G, row_score


@row_score(sinks=4)
def window(keys: Tensor) -> Tensor:
    """All scores are 0: of equal ones the later rows count."""
    scores: Tensor = G.row_scores_age(keys)
    return scores
