"""Rows that the last queries look at, or near which they do; those queries' own rows stay.

Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024).
"""

from typing import Annotated

from pydantic import Field
from torch import Tensor

from ....ir import InputError
from .base import G, row_score


@row_score(recent=32)
def snapkv(
    queries: Tensor,
    keys: Tensor,
    past: Tensor,
    *,
    block: int,
    recent: int,
    attention: dict[str, float],
    pool: Annotated[int, Field(ge=1, le=255)] = 5,
) -> Tensor:
    """The mean attention of the last `recent` queries, averaged over `pool` rows, an odd number."""
    if recent > block:
        raise InputError(
            f"recent={recent}: snapkv asks the queries of these rows, and those of the last "
            f"block={block} are kept"
        )
    given = G.row_attention(queries, keys, past, block=block, last=recent, **attention)
    scores: Tensor = G.row_scores_attention(given, past, pool=pool, recent=recent)
    return scores
