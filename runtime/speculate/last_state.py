"""The target's states that texts' last tokens were chosen from."""

from __future__ import annotations

import torch

from ..feeding.draft import VerifiedStep


class LastState:
    """tokens: i64[B,1], each text's last token; states: [B,1,H], of the step's output `output`,
    what it was chosen from. The same tensors, written anew each time they are asked for.

    A step's outputs live until the next one, so nothing is copied before `get`.
    """

    def __init__(self, output: str, batch: int) -> None:
        self.output = output
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64)
        self._states = torch.empty(0)
        self._latest: VerifiedStep | None = None

    def observe(self, taken: VerifiedStep) -> None:
        """A step was verified; every text that is not done gained a token."""
        self._latest = taken

    def get(self) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens and states."""
        if self._latest is not None:
            self._take(self._latest)
            self._latest = None
        return self._tokens, self._states

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether this is one of the tensors that are written anew."""
        return tensor is self._tokens or tensor is self._states

    def _take(self, taken: VerifiedStep) -> None:
        hidden = taken.outputs[self.output]
        if len(self._states) != len(hidden):
            self._states = hidden.new_zeros(len(hidden), 1, hidden.shape[-1])
        for index, tokens in enumerate(taken.tokens):
            if tokens:
                path = taken.paths[index]
                column = taken.columns[index] + (path[-1] + 1 if path else 0)
                self._states[index, 0] = hidden[index, column]
                self._tokens[index, 0] = tokens[-1]
