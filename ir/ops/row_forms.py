"""Hadamard transform of rows before quantization, and low-rank residuals beside the codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .operands import Operands
from .quantized_cache import hadamard

ROUNDS = 8
"""Rounds of the power iteration."""

LEAST = 1e-20


def _hadamard_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 2, 3, 8),), {}


def _check_width(given: Operands) -> None:
    width = given.sizes["D"]
    if width < 1 or width & (width - 1):
        raise InputError(
            f"{given.op}: rows of {width} have no Hadamard matrix: it must be a power of two"
        )


@op(
    "x: BGTD -> f32 x",
    samples=_hadamard_samples,
    also=_check_width,
    native=Native("BGTD", cast="x"),
)
def hadamard_rows(x: Tensor) -> Tensor:
    """Rows times the orthogonal Hadamard matrix, its own inverse, which spreads outlier channels.

    ``%y: f32[B,G,T,64] = graftwork.hadamard_rows(%x)``

    x [B,G,T,D], D a power of two. Source: Ashkboos et al., "QuaRot" (2024).
    """
    return hadamard(x.float())


def _factor_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 2, 12, 8),), {"group": 6, "rank": 2}
    yield (torch.zeros(1, 2, 4, 8),), {"group": 4, "rank": 3}


def _check_rank(given: Operands, group: int, rank: int) -> None:
    rows, width = given.sizes["T"], given.sizes["D"]
    if not 1 <= rank <= min(group, width):
        raise InputError(
            f"{given.op}: rank={rank} of {group} rows of {width}; expected 1 to the fewer"
        )
    if rows % group:
        raise InputError(f"{given.op}: {rows} rows are no multiple of group={group}")
    given.sizes.update(S=rows // group, N=rank * width)


@op("x: BGTD, R = rank -> f16 BGTR, f16 BGSN", samples=_factor_samples, also=_check_rank)
def low_rank(x: Tensor, *, group: int, rank: int) -> tuple[Tensor, Tensor]:
    """Low-rank approximation of each `group` rows.

    ``%f: (f16[B,G,64,2], f16[B,G,1,128]) = graftwork.low_rank(%e, group=64, rank=2)``

    x [B,G,T,D], T a multiple of group -> left f16[B,G,T,rank], orthonormal columns in a group, and
    right f16[B,G,T/group,rank*D] with x ~ left right, by 8 rounds of power iteration from a fixed
    start. Source: Kang et al., "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless
    Generative Inference of LLM" (2024).
    """
    batch, groups, rows, width = x.shape
    whole = x.float().reshape(batch, groups, rows // group, group, width)
    turned = whole.transpose(3, 4)
    place = torch.arange(width, device=x.device).float()[:, None]
    right = [torch.cos(place * float(column + 1) + float(column)) for column in range(rank)]
    left: list[Tensor] = []
    for _ in range(ROUNDS):
        left = []
        for column in right:
            own = torch.matmul(whole, column)
            for other in left:
                own = own - other * (other * own).sum(3, keepdim=True)
            size = own.pow(2).sum(3, keepdim=True).sqrt()
            left.append(own / size.clamp(min=LEAST))
        right = [torch.matmul(turned, column) for column in left]
    first = torch.cat(left, dim=-1).reshape(batch, groups, rows, rank)
    second = torch.cat(right, dim=3).reshape(batch, groups, rows // group, rank * width)
    return first.to(torch.float16), second.to(torch.float16)


def _product_samples() -> Iterator[Sample]:
    left, right = low_rank(torch.randn(2, 2, 12, 8), group=6, rank=2)
    yield (left, right), {"group": 6}


def _check_factors(given: Operands, right: Tensor, group: int) -> None:
    rank = given.sizes["R"]
    if group < 1 or right.shape[3] % rank:
        raise InputError(
            f"{given.op}: expected right [B,G,S,{rank}*D] and group >= 1, got "
            f"{list(right.shape)}, group={group}"
        )
    given.sizes["D"] = right.shape[3] // rank


@op("left: f16 BGCR, right: f16 BGSN -> f32 BGCD", samples=_product_samples, also=_check_factors)
def low_rank_rows(left: Tensor, right: Tensor, *, group: int) -> Tensor:
    """The rows that factors of `low_rank` approximate.

    ``%e: f32[B,G,C,64] = graftwork.low_rank_rows(%left, %right, group=64)``

    left f16[B,G,C,R] and right f16[B,G,S,R*D] from `low_rank`; `group` rows share a row of right.
    """
    rank = left.shape[3]
    index = torch.arange(left.shape[2], device=left.device)
    each = right.float().index_select(2, torch.div(index, group, rounding_mode="floor"))
    columns = each.split(right.shape[3] // rank, dim=3)
    share = left.float()
    total: Tensor = share[..., :1] * columns[0]
    for column in range(1, rank):
        total = total + share[..., column : column + 1] * columns[column]
    return total
