"""Drawing tokens for transformers as the runtime draws them."""

from __future__ import annotations

import torch

from graftwork.runtime.speculate.noise import Noise
from graftwork.runtime.speculate.sampling import Chances


class Multinomial:
    """In place of `torch.multinomial`: each call is the next place of every text, by the noise of a
    seed."""

    def __init__(self) -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> None:
        """New texts begin."""
        self.noise, self.place = Noise(torch.Generator().manual_seed(seed)), 0

    def __call__(self, probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        chances = Chances(probs.numpy(), None)
        rows = range(len(probs))
        tokens = [self.noise.winner(chances, row, row, self.place) for row in rows]
        self.place += 1
        return torch.tensor(tokens)[:, None]
