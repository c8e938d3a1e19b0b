"""How sure the first layers must be, learnt from where they say what the deeper ones say.

Confidences of predictions that the whole model shares, and of those that it does not, follow a Beta
distribution each. The threshold is the least of ten confidences c, evenly apart from 0.3 to 0.9,
from which on a prediction is shared with the posterior probability that was asked for, where the
two kinds count alike:

    p(c | shared) / (p(c | shared) + p(c | not shared))

Source: Bae et al., "Fast and Robust Early-Exiting Framework for Autoregressive Language Models with
Synchronized Parallel Decoding" (FREE, 2023), section 3.3 and algorithm 1; the ten confidences are
those of the published code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST = 8
"""Predictions of each kind from which on a distribution is fitted."""

GRID = torch.linspace(0.3, 0.9, 10, dtype=torch.float64)
"""Thresholds that come into question."""

EDGE = 1e-4
"""Confidences are kept this far from 0 and 1, where a Beta density may be infinite."""


def threshold(
    confidences: Sequence[float], shared: Sequence[bool], posterior: float, start: float
) -> float:
    """The threshold by the predictions so far: `start` if too few, the largest if none suffices."""
    given = torch.tensor(list(confidences), dtype=torch.float64).clamp(EDGE, 1 - EDGE)
    right = torch.tensor(list(shared), dtype=torch.bool)
    if min(int(right.sum()), int((~right).sum())) < LEAST:
        return start
    good, bad = (_density(given[kind]) for kind in (right, ~right))
    # From where on it holds: far below, where both densities are next to nothing, it may, too.
    below = (good / (good + bad) < posterior).nonzero()
    first = int(below[-1]) + 1 if len(below) else 0
    return float(GRID[min(first, len(GRID) - 1)])


def _density(values: torch.Tensor) -> torch.Tensor:
    """The Beta density on the grid that has the values' mean and variance."""
    a, b = fitted(values)
    scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    logs = scale + (a - 1) * GRID.log() + (b - 1) * (-GRID).log1p()
    return logs.exp().clamp(min=1e-300)


def fitted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters a, b of the Beta distribution with the mean and the variance of values f64[N].

    >>> a, b = fitted(torch.tensor([0.25, 0.75], dtype=torch.float64))
    >>> float(a), float(b)
    (1.5, 1.5)
    """
    mean, spread = values.mean(), values.var(unbiased=False).clamp(min=1e-8)
    size = mean * (1 - mean) / spread - 1
    return mean * size, (1 - mean) * size
