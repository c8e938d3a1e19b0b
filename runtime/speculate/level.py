"""Predictions for the nodes of a draft that lie as deep as each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]
Scores: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Level:
    """Candidates to follow each of M nodes, in every sequence of a batch, the likeliest first.

    tokens: i64[B,M,K], -1 where there is none. scores: f32[B,M,K], log probabilities (an order at
    least). logits: f32[B,M,V] if the proposer has whole distributions. odds: f32[B,M], the log odds
    that the target accepts each of the M nodes, those above it being accepted, if it knows them.
    warped: whether logits are log probabilities of what is to be sampled from, after the user's
    temperature and filters.
    """

    tokens: Ids
    scores: Scores
    logits: Scores | None = None
    odds: Scores | None = None
    warped: bool = False


def repeated(level: Level, parents: Ids) -> Level:
    """The same candidates after every node of a level."""
    shape, logits = parents.shape, level.logits
    # Views: a level's distributions over the vocabulary are too large to be written once a node.
    return Level(
        np.broadcast_to(level.tokens, (*shape, level.tokens.shape[-1])),
        np.broadcast_to(level.scores, (*shape, level.scores.shape[-1])),
        None if logits is None else np.broadcast_to(logits, (*shape, logits.shape[-1])),
    )
