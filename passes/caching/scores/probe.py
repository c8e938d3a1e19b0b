"""Rows that one query looks at which stands for those of the last block, each weighing as much as
it is unlike their mean.

Source: Xiao et al., "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context
LLMs Inference" (2025).
"""

from torch import Tensor

from .base import G, row_score


@row_score(sinks=4, recent=32)
def probe(
    queries: Tensor,
    keys: Tensor,
    past: Tensor,
    *,
    block: int,
    recent: int,
    attention: dict[str, float],
) -> Tensor:
    """The attention of that query."""
    asked: Tensor = G.probe_query(queries, block=block)
    given = G.row_attention(asked, keys, past, block=1, last=1, **attention)
    scores: Tensor = G.row_scores_attention(given, past, recent=recent)
    return scores
