"""What products read at one place: sums of it over the tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir import PassError

STRIP = 256
"""Columns of a matrix of moments that are summed at once: only its lower half is."""


@dataclass
class Moments:
    """What products read at one place, over all tokens of the text.

    hessian: f32[K,K], 2/N sum of x x^T over N tokens, which is the second derivative of a product's
    mean squared error by each row of its weight. magnitude: f32[K], mean |x|.
    """

    hessian: Tensor
    magnitude: Tensor


class Sums:
    """Sums over tokens, as they come."""

    def __init__(self, columns: int) -> None:
        self.hessian = torch.zeros(columns, columns)
        self.magnitude = torch.zeros(columns)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Values [...,K]."""
        rows = x.reshape(-1, x.shape[-1]).float()
        self.count += len(rows)
        self.magnitude += rows.abs().sum(0)
        for start in range(0, rows.shape[1], STRIP):
            strip = slice(start, start + STRIP)
            self.hessian[start:, strip].addmm_(rows[:, start:].T, rows[:, strip])

    def moments(self, where: str) -> Moments:
        """where: what the values are, for people. Errors: `PassError` for values that are not
        finite."""
        hessian = self.hessian.mul_(2 / self.count)
        if not (torch.isfinite(hessian.diagonal()).all() and torch.isfinite(self.magnitude).all()):
            raise PassError(
                f"{where} on the calibration text is not finite (NaN, or too large for float32): "
                f"expected a model that can read this text; run it in float32, and check its "
                f"weights"
            )
        for start in range(0, len(hessian), STRIP):
            end = start + STRIP
            corner = hessian[start:end, start:end].tril(-1)
            hessian[start:end, start:end] = hessian[start:end, start:end].tril() + corner.T
            hessian[start:end, end:] = hessian[end:, start:end].T
        return Moments(hessian, self.magnitude / self.count)


def loss(error: Tensor, hessian: Tensor) -> Tensor:
    """What each row of a weight's error f32[N,K] adds to the squared error of its product, f32[N],
    up to a factor: e H e^T."""
    return ((error @ hessian) * error).sum(-1)
