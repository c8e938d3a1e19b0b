"""Rounding column by column, each error carried over to the columns that are still to come.

For a row w of a weight and the second derivatives H of its product's error, column i is rounded,
and what is left of the row moves against the error along row i of U, the upper Cholesky factor of
the inverse of H: e = (w_i - q_i) / U_ii, w_j -= e U_ij for j > i. Columns of a block are brought up
to date one by one, those behind it once a block. Rows of a weight do not touch each other, so all
of them go through it together, and the weight is held transposed: a column then lies in one piece.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....ir import PassError
from ....ir.ops.numerics import Numeric, Quantized, nearest, pack
from ...engine.moments import Moments

BLOCK = 128
"""Columns of a block, unless groups make it more."""

ROWS = 512
"""Rows that are packed at once."""

RIDGE = 1e-6
"""Added to the diagonals of normal equations, as a share of their mean."""

Scales = tuple[Tensor, Tensor | None]
"""Scales and offsets of a group: one a row, [N]."""


class Factor(NamedTuple):
    """The upper Cholesky factor f32[K,K] of the inverse of H, and the columns bool[K] of which the
    text never makes use."""

    upper: Tensor
    dead: Tensor


class Prepared(NamedTuple):
    """The second derivatives f32[K,K], damped, and their inverse's factor."""

    hessian: Tensor
    factor: Factor


def damped(hessian: Tensor, damp: float) -> Tensor:
    """A matrix with `damp` times the mean of its diagonal added to that, in place."""
    diagonal = hessian.diagonal()
    diagonal += damp * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return hessian


def solved(matrix: Tensor, wanted: Tensor) -> Tensor:
    """Solutions f64[N,n] of normal equations f64[N,n,n], whose right sides are f64[N,n], with
    `RIDGE` times the mean of their diagonals added to those."""
    ridge = RIDGE * matrix.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    matrix = matrix + ridge * torch.eye(matrix.shape[1])
    found: Tensor = torch.linalg.solve_ex(matrix, wanted[..., None]).result[..., 0]
    return found


def inverse_factor(moments: Moments, damp: float) -> Factor:
    """Of a matrix of moments, which is used up, with `damp` times the mean of its diagonal added to
    it. A column that is zero on all of the text gets 1 on its diagonal.

    Errors: `PassError` for a matrix that is not positive definite all the same.
    """
    hessian = moments.hessian
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    diagonal += damp * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if not failed:
        hessian = torch.cholesky_inverse(lower, out=hessian)
        upper, failed = torch.linalg.cholesky_ex(hessian, upper=True, out=(lower, failed))
    if failed:
        raise PassError(
            f"the second derivatives of a product's error are not positive definite: its inputs "
            f"on the calibration text depend on each other too closely, or it is too short; give "
            f"more text of other kinds, or set tuning: {{damp: {max(damp, 0.005) * 2}}}"
        )
    return Factor(upper, dead)


def round_with_feedback(
    weight: Tensor,
    factor: Factor,
    numeric: Numeric,
    taken: Callable[[Tensor, int], Scales] | None = None,
) -> Quantized:
    """A weight f32[N,K] in a format.

    taken: of a group's values f32[N,group] and its first column, its scales and offsets [N]; asked
    when that column is reached, with values as they are then. None: those of the values' range.
    """
    scales: list[Scales] = []

    def step(i: int, left: Tensor) -> tuple[Tensor, Tensor]:
        if i % numeric.group == 0:
            values = left[i : i + numeric.group].T
            scales.append(numeric.scales(values) if taken is None else taken(values, i))
        found = numeric.steps(left[i], *scales[-1])
        return found, numeric.values(found, *scales[-1])

    steps = _fed_back(weight, factor, _block(weight.shape[1], numeric.group), step)
    scale = torch.stack([scale for scale, _ in scales], 1)
    offsets = [offset for _, offset in scales if offset is not None]
    packed = torch.cat([pack(rows.contiguous(), numeric.bits) for rows in steps.T.split(ROWS)])
    return Quantized(packed, scale, torch.stack(offsets, 1) if offsets else None)


def scales_of(stored: Quantized, group: int) -> Callable[[Tensor, int], Scales]:
    """For `round_with_feedback`: the scales of a weight as it is stored."""

    def taken(values: Tensor, column: int) -> Scales:
        offset = None if stored.offset is None else stored.offset[:, column // group]
        return stored.scale[:, column // group], offset

    return taken


def mapped_with_feedback(weight: Tensor, factor: Factor, scale: Tensor, book: Tensor) -> Tensor:
    """Entries u8[N,K] of a codebook f32[L], times a scale a row f32[N,1], for a weight f32[N,K]."""
    by = scale.flatten()

    def step(i: int, left: Tensor) -> tuple[Tensor, Tensor]:
        found = nearest(left[i] / by, book)
        return found, book[found.long()] * by

    return _fed_back(weight, factor, BLOCK, step).T.contiguous()


def _fed_back(
    weight: Tensor,
    factor: Factor,
    block: int,
    step: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Codes u8[K,N] of a weight f32[N,K]. step: of a column's number and what is left of all
    columns f32[K,N], the codes of that column and what they stand for."""
    left = weight.T.float().clone(memory_format=torch.contiguous_format)
    left[factor.dead] = 0
    codes = torch.empty(left.shape, dtype=torch.uint8)
    for start in range(0, len(left), block):
        end = min(start + block, len(left))
        errors = torch.empty(end - start, left.shape[1])
        for i in range(start, end):
            found, value = step(i, left)
            codes[i] = found.to(torch.uint8)
            error = (left[i] - value) / factor.upper[i, i]
            left[i:end].addr_(factor.upper[i, i:end], error, alpha=-1)
            errors[i - start] = error
        left[end:].addmm_(factor.upper[start:end, end:].T, errors, alpha=-1)
    return codes


def _block(columns: int, group: int) -> int:
    """Columns of a block: a group begins where all columns are up to date."""
    if group <= BLOCK:
        return BLOCK // group * group
    return BLOCK if group % BLOCK == 0 or group == columns else group
