"""Linear maps between rows, by least squares on rows that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

PENALTY = 1e-6
"""Of the least squares, over the inputs' mean square."""


class Linear(NamedTuple):
    """weight f32[G*D,inputs], bias f32[G*D], the share of the variance that they leave, and the
    dtype in which they run."""

    weight: torch.Tensor
    bias: torch.Tensor
    left: float
    dtype: torch.dtype = torch.float32


def solved(inputs: torch.Tensor, wanted: Sequence[torch.Tensor]) -> list[Linear]:
    """Least squares of each of the `wanted` f64[N,O] from `inputs` f64[N,I], about their means."""
    middle = inputs.mean(0)
    centred = inputs - middle
    square = centred.T @ centred
    square += PENALTY * square.diagonal().mean().clamp(min=1e-12) * torch.eye(len(square))
    factor = torch.linalg.cholesky(square)
    made = []
    for rows in wanted:
        mean = rows.mean(0)
        weight = torch.cholesky_solve(centred.T @ (rows - mean), factor).T
        rest = (rows - mean - centred @ weight.T).square().sum()
        varies = (rows - mean).square().sum().clamp(min=1e-12)
        made.append(Linear(weight.float(), (mean - weight @ middle).float(), float(rest / varies)))
    return made
