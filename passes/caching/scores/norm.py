"""Rows with small keys.

Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
(2024).
"""

from torch import Tensor

from .base import G, row_score


@row_score()
def norm(keys: Tensor) -> Tensor:
    """Minus the logarithm of a key's length."""
    scores: Tensor = G.row_scores_norm(keys)
    return scores
