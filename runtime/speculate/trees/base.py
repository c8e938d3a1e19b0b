"""What a tree policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ...asking.options import GenerationOptions
from ...feeding.draft import Draft
from ...registry import Registry
from ..lengths.base import LengthPolicy
from ..level import Level
from ..noise import DraftNoise
from ..proposers.base import Proposer
from ..sampling import Chances, warp

PLAIN = GenerationOptions()
"""Options of a call that asks for nothing."""


class TreePolicy(ABC):
    """Grows drafts out of a proposer's predictions, level by level.

    options: how tokens are drawn where the record samples. noise: by which a chain's are, if that
    is the target's own.
    Register a subclass with ``@TREES.register(ItsRecord)`` in its own file of this folder.
    """

    noise: DraftNoise | None = None

    def __init__(self, record: Any, options: GenerationOptions = PLAIN) -> None:
        self.record, self.options = record, options

    @abstractmethod
    def grow(self, proposer: Proposer, depths: Sequence[int], length: LengthPolicy) -> list[Draft]:
        """A draft for each sequence, at most `depths[b]` levels deep; 0: `NO_DRAFT`.

        length: asked after each level whether to go deeper (`goes_deeper`). At least one depth is
        positive.
        """


TREES: Registry[TreePolicy] = Registry(__package__)


def goes_deeper(length: LengthPolicy, level: Level, depth: int, depths: list[int]) -> bool:
    """Whether any sequence's draft should get a level below level number `depth`.

    depths: levels of each sequence at most; shortened where the length policy has enough.
    """
    going = length.goes_on(level, depth)
    if not going.all():
        for index, more in enumerate(going.tolist()):
            depths[index] = depths[index] if more else min(depths[index], depth)
    return max(depths) > depth


def chances_of(level: Level, rows: Any, options: GenerationOptions) -> Chances:
    """What to sample from after some nodes of a level, which has logits. rows: their index."""
    assert level.logits is not None
    scores = torch.from_numpy(level.logits[rows]).float()
    return Chances(scores.softmax(-1).numpy(), None) if level.warped else warp(scores, options)


def chosen(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """A draft of the nodes that have a token (>= 0) and whose parents have one."""
    new = {-1: -1}
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token >= 0 and parent in new:
            new[node] = len(kept)
            kept.append(node)
    return Draft([tokens[node] for node in kept], None, tuple(new[parents[n]] for n in kept))
