"""A layer of its own, with a cache of its own, that also reads keys and values of the target.

Source: Du et al., "GliDe with a CaPE: A Low-Hassle Method to Accelerate Speculative Decoding"
(2024). Drafted tokens see the rows that the target has of the committed text, and no others:
`CommittedRows.seen` says how many these are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ....ir.plan import CachedDraft, record
from ....ir.plan.bounds import Levels
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.cached import CachedProposer


@dataclass(frozen=True)
class SharingDraft(CachedDraft):
    """Base of drafters whose function, besides what it takes of `CachedDraft`, reads states of the
    target, and ``seen`` [B,T], how many of their rows each token sees.

    block: in training, a text is cut into blocks of so many tokens, which see the target's rows
    before their block, as tokens of one draft do.
    """

    block: Levels = 5
    unrolls: ClassVar[bool] = False

    @property
    def alone(self) -> bool:
        return False


@record
@dataclass(frozen=True)
class GlideDraft(SharingDraft):
    """A layer over the text's tokens that attends to a layer of the target (GliDe)."""

    kind: ClassVar[str] = "glide"


@PROPOSERS.register(GlideDraft)
class GlideProposer(CachedProposer):
    """As any layer with a cache, whose tokens see the target's rows of the committed text."""

    record: GlideDraft


def rows_seen(width: int, block: int) -> torch.Tensor:
    """i64[T], how many of the target's rows each token of a text sees. Blocks begin at its second
    token.

    >>> rows_seen(8, 3).tolist()
    [0, 1, 1, 1, 4, 4, 4, 7]
    """
    places = torch.arange(width)
    return torch.where(places > 0, 1 + (places - 1) // block * block, 0)
