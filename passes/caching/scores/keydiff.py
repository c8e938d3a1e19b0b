"""Rows whose keys are unlike the others.

Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference
in Resource-Constrained Environments" (2025).
"""

from torch import Tensor

from .base import G, row_score


@row_score()
def keydiff(keys: Tensor, past: Tensor) -> Tensor:
    """Minus the cosine between a key and the mean of all keys."""
    scores: Tensor = G.row_scores_keydiff(keys, past)
    return scores
