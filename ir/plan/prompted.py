"""The draft record of trained prompt tokens that ride along with a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .base import Returned, Size, record
from .bounds import Factor, Levels, Nodes
from .draft import DraftRecord

if TYPE_CHECKING:
    from .decode import DecodePlan


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

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`."""
        yield plan.step.plain, {"draft_tokens": ("", "", "K"), "draft_scores": ("", "", "K")}

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        """See `Record.looks_up`."""
        yield self.weight, False, (self.prompts, "")

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
