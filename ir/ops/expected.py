"""Expected attention: scores of rows by queries that are predicted from the latest ones.

Queries before rotation are modelled by a normal distribution with the mean and covariance of the
latest block. Rotations compose, so a rotated query of the block is rotated further by the distance
to future positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .attention import grouped
from .operands import Operands
from .rotary import rotated

HIDDEN = -1e30


def _turned_samples() -> Iterator[Sample]:
    queries = torch.randn(2, 4, 5, 6)
    angle = torch.arange(9)[:, None] * torch.tensor([1.0, 0.1])
    for interleaved in (False, True):
        tables = angle.cos() * 1.2, angle.sin() * 1.2
        yield (queries, *tables), {"block": 4, "ahead": 5, "interleaved": interleaved}
    yield (queries, None, None), {"block": 4, "ahead": 5}


def _check(
    given: Operands, queries: Tensor, cos: Tensor | None, sin: Tensor | None, block: int, ahead: int
) -> None:
    if block < 1 or ahead < 1 or (cos is None) != (sin is None):
        raise InputError(
            f"{given.op}: expected block, ahead >= 1 and both tables or none, got "
            f"block={block}, ahead={ahead}"
        )
    if cos is not None and (2 * cos.shape[1] > queries.shape[3] or block + ahead > cos.shape[0]):
        raise InputError(
            f"{given.op}: expected tables [P,R] with 2R <= D={queries.shape[3]} and "
            f"P >= block + ahead = {block + ahead}, got {list(cos.shape)}"
        )


@op("queries: BHWD, cos: PR, sin: PR, N = block -> f32 BHND", samples=_turned_samples, also=_check)
def expected_queries(
    queries: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    block: int,
    ahead: int,
    interleaved: bool = False,
) -> Tensor:
    """The last `block` queries under the average rotation of the next `ahead` positions.

    ``%u: f32[B,H,64,D] = graftwork.expected_queries(%q, @cos, @sin, block=64, ahead=512)``

    queries [B,H,W,D], W >= block: row i was rotated for the position block - i before the next
    token's. cos, sin [P,R]: row p for position p, P >= block + ahead; None: queries have no
    rotation. Tables may be scaled, as the queries already are.
    Source: Devoto et al., "Expected Attention" (2025), the average rotation.
    """
    asked = queries.index_select(2, torch.arange(block, device=queries.device)).float()
    if cos is None or sin is None:
        return asked.clone()
    count = block + ahead
    cos, sin = cos[:count].float(), sin[:count].float()
    length = (cos * cos + sin * sin).sqrt()
    near = block - torch.arange(block, device=queries.device)[:, None]
    far = torch.arange(count, device=queries.device)[None]
    share = ((far >= near) & (far < near + ahead)).float() / ahead
    mean_cos, mean_sin = torch.matmul(share, cos / length), torch.matmul(share, sin / length)
    return rotated(asked, mean_cos, mean_sin, interleaved)


def _expected_samples() -> Iterator[Sample]:
    keys, values = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 6)
    given = torch.randn(2, 4, 4, 4), keys, values, torch.tensor([8, 4])
    yield given, {"sinks": 2, "scale": 0.5}
    yield given, {"sinks": 0, "scale": 1.0}


@op(
    "queries: BHWD, keys: BGCD, values: BGCE, past: i64 B, H % G -> f32 BGC",
    samples=_expected_samples,
)
def expected_attention(
    queries: Tensor, keys: Tensor, values: Tensor, past: Tensor, *, sinks: int, scale: float
) -> Tensor:
    """Expected contribution of rows to outputs: attention times the norm of the value.

    ``%a: f32[B,G,C] = graftwork.expected_attention(%u, %keys, %values, %past, sinks=4, scale=0.5)``

    queries f32[B,H,W,D] from `expected_queries`; keys [B,G,C,D]; values [B,G,C,E]; past i64[B] rows
    are valid. A row's logit is mean + variance / 2 of its products with a head's queries, because
    E[exp(q k)] = exp(m + v / 2) for normal queries. Attention is the softmax over valid rows except
    the first `sinks`, averaged over a group's heads; other rows get 0. Source: Devoto et al.,
    "Expected Attention" (2025).
    """
    batch, groups, rows, _ = keys.shape
    heads, count = queries.shape[1], queries.shape[2]
    products = torch.matmul(grouped(queries.float(), groups), keys.float().transpose(2, 3)) * scale
    products = products.reshape(batch, groups, heads // groups, count, rows)
    mean = products.mean(3)
    logits = mean + (products - mean[:, :, :, None]).pow(2).mean(3) / 2
    place = torch.arange(rows, device=past.device)[None]
    counted = ((place >= sinks) & (place < past[:, None]))[:, None, None]
    weights = torch.softmax(logits.masked_fill(~counted, HIDDEN), dim=-1)
    given = weights.masked_fill(~counted, 0.0).mean(2)
    return given * values.float().pow(2).sum(-1).sqrt()
