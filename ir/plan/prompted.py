"""The draft record of trained prompt tokens that ride along with a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import record
from .bounds import Factor, Levels, Nodes
from .draft import DraftRecord


@record
@dataclass(frozen=True)
class PromptDraft(DraftRecord):
    """Prompt tokens behind the nodes of a draft, which predict the places ahead (PPD).

    The step takes the ids vocabulary + 0, 1, ... for them, and returns the best ``draft_tokens``
    and ``draft_scores`` (log probabilities) [B,S,K] after every token. weight: f[prompts,H], their
    trained embeddings. prompts: in a row behind a node, and so the places that are predicted.
    after: nodes that get some, the root counted: those where verification will likeliest end.
    decay: in training, the weight of level d's loss is decay^d. trained: whether the weights know
    anything.
    """

    weight: str = "ppd.prompts"
    prompts: Levels = 3
    after: Nodes = 8
    decay: Factor = 0.8
    trained: bool = False
    kind: ClassVar[str] = "prompts"
    grows: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    @property
    def reads(self) -> tuple[str, ...]:
        """What the target says after the prompt tokens."""
        return ("draft_tokens", "draft_scores")

    @property
    def levels(self) -> int:
        """Places predicted."""
        return self.prompts

    def riders(self, nodes: int) -> int:
        """`prompts` for each node that gets some."""
        return self.prompts * min(self.after, nodes + 1)
