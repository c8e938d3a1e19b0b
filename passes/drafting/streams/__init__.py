"""Streams that begin within the target beside a token's own, and predict the places ahead.

Source: Bhendawade et al., "Speculative Streaming: Fast LLM Inference without Auxiliary Models"
(2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....ir.plan import record
from ....ir.plan.bounds import Filled
from ....runtime.speculate.proposers.base import PROPOSERS
from ..ppd import PromptProposer, RidingDraft


@record
@dataclass(frozen=True)
class StreamDraft(RidingDraft):
    """Streams behind the nodes of a draft, which predict the places ahead (Speculative Streaming).

    prompts: streams of a node. used: names of their weights: a map of low rank and an embedding for
    each stream.
    """

    used: Filled[tuple[str, ...]] = ()
    kind: ClassVar[str] = "streams"

    @property
    def weights(self) -> set[str]:
        return set(self.used)


@PROPOSERS.register(StreamDraft)
class StreamProposer(PromptProposer):
    """As of prompt tokens."""
