"""OpenAI's options that change scores, as logits processors of `generate`."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class Biased:
    """Adds a number to the logits of some tokens (``logit_bias``). biases: by token ids."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.ids = torch.tensor(list(biases), dtype=torch.int64)
        self.values = torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """ids: i64[R,L]; scores: f32[R,V], which change.

        >>> Biased({1: 2.0})(torch.tensor([[0]]), torch.zeros(1, 3)).tolist()
        [[0.0, 2.0, 0.0]]
        """
        scores[:, self.ids] += self.values
        return scores


class Repeated:
    """Takes from the logits of tokens that stand in the new text ``presence`` once and
    ``frequency`` for each time, as OpenAI defines both penalties. prompt: tokens before it."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """ids: i64[R,L]; scores: f32[R,V].

        >>> Repeated(1, 0.5, 0.25)(torch.tensor([[2, 1, 1]]), torch.zeros(1, 3)).tolist()
        [[0.0, -1.0, 0.0]]
        """
        new = ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, new, torch.ones(new.shape))
        return scores - self.frequency * counts - self.presence * (counts > 0)
