"""A layer on the target's features whose every call predicts a block of tokens.

Source: Gao et al., "Falcon: Faster and Parallel Inference of Large Language Models through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field

from ....ir.plan import CachedDraft, record
from ....ir.plan.bounds import MOST_LEVELS, Share
from ....ir.support.errors import InputError
from ....runtime.feeding.gather import gathered
from ....runtime.speculate.level import Ids, Level
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.proposers.cached import CachedProposer
from ....runtime.speculate.proposers.hidden import level_of, taken_at
from ....runtime.speculate.setting import Setting


@record
@dataclass(frozen=True)
class SemiAutoregressiveDraft(CachedDraft):
    """A function with a cache that predicts `block` levels a call (Falcon).

    Place t is fed token t + 1 and the feature of token t, and tells of the feature and token
    `block` places on. The last `block` places of the text see each other, whatever their order, and
    so do those of a drafted block, which takes the states that told of its tokens; all other places
    see what precedes them. Tokens of a block are predicted independently of each other.

    glance: in training, the part of the wrong predictions whose answers are shown to the block.
    hard: the part of the loss of tokens that the text's own tokens have.
    """

    block: Annotated[int, Field(ge=2, le=MOST_LEVELS)] = 2
    glance: Share = 0.3
    hard: Share = 0.1
    kind: ClassVar[str] = "semi_autoregressive"
    stepwise: ClassVar[bool] = False
    unrolls: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        if self.levels < self.block:
            raise InputError(
                f"draft={self.kind}: levels={self.levels} is less than the block={self.block} that "
                f"one call predicts: draft as many levels, or give it smaller blocks"
            )

    @property
    def mutual(self) -> tuple[str, ...]:
        return (self.function,)


@PROPOSERS.register(SemiAutoregressiveDraft)
class BlockwiseProposer(CachedProposer):
    """Asks the function once for `block` levels: within a block its places tell by depth alone what
    may follow any node.

    told: the last call's candidates [B,N*K,...], block after block. made: its states. roots: i64
    [B,M], the block that each node of the last level belongs to. path: i64[B,M,D], the tokens from
    the block's beginning down to each node.
    """

    record: SemiAutoregressiveDraft
    path: Ids

    def __init__(self, record: SemiAutoregressiveDraft, setting: Setting) -> None:
        self.block = record.block
        super().__init__(record, setting)

    def root(self, count: int) -> Level:
        outputs = self.committed.catch_up()
        batch = len(self.committed.texts)
        self.nodes = self.no_nodes(0)
        self.roots: Ids = np.zeros((batch, 1), dtype=np.int64)
        return self._begin(outputs, count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        self.roots = np.take_along_axis(self.roots, parents, 1)
        above = np.take_along_axis(self.path, parents[:, :, None], 1)
        self.path = np.concatenate([above, tokens[:, :, None]], 2)
        if self.path.shape[2] < self.block:
            return self._level_here(count)
        return self._begin(self._next(), count)

    def _next(self) -> Mapping[str, torch.Tensor]:
        """Feed each node's block, which its parent's call has told the states of."""
        batch, many, block = self.path.shape
        places = (self.roots[:, :, None] * block + np.arange(block)).reshape(batch, -1)
        outputs = self.fed(
            self.path.reshape(batch, -1), self.roots, gathered(self.made["hidden"], places)
        )
        self.roots = np.broadcast_to(np.arange(many), (batch, many))
        return outputs

    def _begin(self, outputs: Mapping[str, torch.Tensor], count: int) -> Level:
        """The first level that a call has told of."""
        self.made = outputs
        self.told = level_of(outputs, outputs["draft_tokens"].shape[-1])
        self.told.tokens[self.committed.lacking] = -1
        self.path = np.empty((*self.roots.shape, 0), dtype=np.int64)
        return self._level_here(count)

    def _level_here(self, count: int) -> Level:
        level = taken_at(self.told, self.roots * self.block + self.path.shape[2])
        return Level(level.tokens[..., :count], level.scores[..., :count], level.logits)
