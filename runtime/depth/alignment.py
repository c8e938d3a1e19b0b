"""How sure the first layers must be, learnt from where they say what the deeper ones say.

Confidences of predictions that the whole model shares, and of those that it does not, follow a Beta
distribution each. The threshold is the lowest confidence c from which on a prediction is shared
with the posterior probability that was asked for, where the two kinds count alike:

    p(c | shared) / (p(c | shared) + p(c | not shared))

Source: Bae et al., "Fast and Robust Early-Exiting Framework for Autoregressive Language Models with
Synchronized Parallel Decoding" (FREE, 2023), section 3.3 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LEAST = 8
"""Predictions of each kind from which on a distribution is fitted."""

GRID = torch.linspace(0.0, 1.0, 201, dtype=torch.float64)[1:-1]
"""Thresholds that come into question."""

EDGE = 1e-4
"""Confidences are kept this far from 0 and 1, where a Beta density may be infinite."""


def threshold(
    confidences: Sequence[float], shared: Sequence[bool], posterior: float, start: float
) -> float:
    """The threshold that predictions so far ask for; `start` while there are too few of a kind."""
    given = torch.tensor(list(confidences), dtype=torch.float64).clamp(EDGE, 1 - EDGE)
    right = torch.tensor(list(shared), dtype=torch.bool)
    if min(int(right.sum()), int((~right).sum())) < LEAST:
        return start
    good, bad = (_density(given[kind]) for kind in (right, ~right))
    chance = good / (good + bad)
    # From where on it holds: far below, where both densities are next to nothing, it may, too.
    below = (chance < posterior).nonzero()
    first = int(below[-1]) + 1 if len(below) else 0
    return float(GRID[first]) if first < len(GRID) else 1.0


def _density(values: torch.Tensor) -> torch.Tensor:
    """The Beta density on the grid that fits values best."""
    a, b = fitted(values)
    scale = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    logs = scale + (a - 1) * GRID.log() + (b - 1) * (-GRID).log1p()
    return logs.exp().clamp(min=1e-300)


def fitted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest parameters a, b of a Beta distribution, of values f64[N] in 0..1."""
    mean, spread = values.mean(), values.var(unbiased=False).clamp(min=1e-8)
    scale = (mean * (1 - mean) / spread - 1).clamp(min=1e-2)
    point = torch.stack([mean * scale, (1 - mean) * scale]).log()
    logs = torch.stack([values.log().mean(), (-values).log1p().mean()])
    for _ in range(50):
        both = point.exp()
        total = both.sum()
        # Of the mean log likelihood, by the logarithms of a and b, which keeps both positive.
        slope = both * (torch.digamma(total) - torch.digamma(both) + logs)
        bend = torch.outer(both, both) * torch.polygamma(1, total)
        bend = bend + torch.diag(slope - both.square() * torch.polygamma(1, both))
        step = torch.linalg.solve(bend - 1e-9 * torch.eye(2, dtype=torch.float64), slope)
        step = step.clamp(-1.0, 1.0)
        point = point - step
        if float(step.abs().max()) < 1e-9:
            break
    a, b = point.exp()
    return a, b
