"""What inductor runs steps with on a GPU.

Attention of a few tokens reads every row of the caches once and multiplies next to nothing. Library
kernels that take a mask give each head a piece of the device, which is a few of its processors; as
two products, attention spreads over all of them, and takes a third of the time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .gpu_products import quantized_linear
from .rows import Row, check_attend
from .rows import attend as library_attend

NARROW = 64
"""Tokens up to which scores are worked out for themselves: they take memory, and a prompt's take
much."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """`graftwork.attend`, by two products for a few tokens.

    Scores come out of the first in the dtype of q, as in transformers' own attention, and are
    float32 from then on.
    """
    check_attend(q, k, v, mask, bias, sinks)
    batch, heads, width, dim = q.shape
    if width > NARROW or sinks is not None or softcap is not None or dim != v.shape[3]:
        return library_attend(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
    groups, rows = k.shape[1], k.shape[2]
    each = heads // groups
    # A power of two rounds nothing, and keeps sums of products in what float16 can say.
    shrunk = 2.0 ** math.ceil(math.log2(scale))
    query = (q * shrunk).reshape(batch, groups, each * width, dim)
    products = query @ k.to(q.dtype).transpose(2, 3)
    scores = products.reshape(batch, heads, width, rows).float() * (scale / shrunk)
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(q.dtype)
    out = weights.reshape(batch, groups, each * width, rows) @ v.to(q.dtype)
    return out.reshape(batch, heads, width, dim)


GPU_ROWS: dict[Any, Row] = {
    torch.ops.graftwork.attend.default: attend,
    torch.ops.graftwork.quantized_linear.default: quantized_linear,
}
