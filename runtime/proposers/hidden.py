"""Proposers that start from the target's hidden state after a sequence's last committed token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..drafters.base import Taken
from .base import Ids, Level, Proposer


class HiddenProposer(Proposer):
    """Keeps `state` [B,1,H], the hidden state that the last token was chosen from, and `last`
    i64[B,1], that token."""

    wants = ("hidden",)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is known before the prompt has run."""
        self.last = torch.zeros(len(prompts), 1, dtype=torch.int64)
        self.state = torch.empty(0)

    def observe(self, taken: Taken) -> None:
        """Take the state of the last accepted node, and the token chosen there."""
        hidden = taken.outputs["hidden"]
        if len(self.state) != len(hidden):
            self.state = hidden.new_zeros(len(hidden), 1, hidden.shape[-1])
        for index, tokens in enumerate(taken.tokens):
            if tokens:
                path = taken.paths[index]
                column = taken.columns[index] + (path[-1] + 1 if path else 0)
                self.state[index, 0] = hidden[index, column]
                self.last[index, 0] = tokens[-1]

    def run(self, function: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """All outputs of a function of the program."""
        fn = self.executable.program.function(function)
        return self.executable.run(function, inputs, tuple(fn.outputs))


def level_of(outputs: Mapping[str, torch.Tensor], count: int, place: int | None = None) -> Level:
    """The candidates in a draft function's outputs; place: of a head, in dim 2."""
    named = [outputs[name] for name in ("draft_tokens", "draft_scores", "draft_logits")]
    tokens, scores, logits = named if place is None else [value[:, :, place] for value in named]
    # Copies: outputs live until the next run.
    return Level(
        tokens[..., :count].cpu().numpy().copy(),
        scores[..., :count].float().cpu().numpy().copy(),
        logits.float().cpu().numpy(),
    )


def repeated(level: Level, parents: Ids) -> Level:
    """The same candidates after every node of a level."""
    batch, nodes = parents.shape
    # Views: a level's distributions over the vocabulary are too large to be written once a node.
    tokens, scores, logits = (
        None if part is None else np.broadcast_to(part, (batch, nodes, part.shape[-1]))
        for part in (level.tokens, level.scores, level.logits)
    )
    assert tokens is not None and scores is not None
    return Level(tokens, scores, logits)
