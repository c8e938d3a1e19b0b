"""Ops for which torch has something better than the decomposition.

Every other graftwork op is inlined as its meaning, which torch.compile traces through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ir.ops import all_ops
from ...ir.ops.attention import attend as attend_meaning

G = torch.ops.graftwork
check_attend = all_ops()["attend"].declared.check


Row = Callable[..., Any]


def cache_write_(cache: Tensor, new: Tensor, past: Tensor) -> Tensor:
    """`cache_write` into the state buffer itself; legal where nothing else reads the old state."""
    steps = torch.arange(new.shape[2], device=past.device)
    if cache.shape[0] == 1:
        return cache.index_copy_(2, past + steps, new.to(cache.dtype))
    rows = (past[:, None] + steps)[:, None, :, None].expand(new.shape)
    return cache.scatter_(2, rows, new.to(cache.dtype))


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
    """`attend` with the query heads of a group as rows of one product: keys are never repeated."""
    check_attend(q, k, v, mask, bias, sinks)
    if sinks is not None or softcap is not None or q.shape[3] != v.shape[3]:
        result: Tensor = attend_meaning(q, k, v, mask, bias, sinks, scale=scale, softcap=softcap)
        return result
    batch, heads, width, dim = q.shape
    groups, rows = k.shape[1], k.shape[2]
    each = heads // groups
    if bias is None:
        extra = mask.expand(batch, each, width, rows) if width > 1 else mask
        extra = extra.reshape(batch, 1, each * width if width > 1 else 1, rows)
    else:
        extra = bias.masked_fill(~mask, float("-inf")).to(q.dtype)
        extra = extra.reshape(batch, groups, each * width, rows)
    grouped = q.reshape(batch, groups, each * width, dim)
    out = F.scaled_dot_product_attention(
        grouped, k.to(q.dtype), v.to(q.dtype), attn_mask=extra, scale=scale
    )
    return out.reshape(batch, heads, width, dim)


ROWS: dict[Any, Row] = {
    # Values of programs have no strides.
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    G.attend.default: attend,
    # One call: written out, loops over groups or blocks would be thousands of calls for a compiler.
    G.quantized_linear.default: G.quantized_linear.default,
    G.linear_attention_step.default: G.linear_attention_step.default,
    G.linear_attention_step_int8.default: G.linear_attention_step_int8.default,
    # What other processes wait for is no code to trace through.
    G.all_reduce.default: G.all_reduce.default,
    G.all_gather.default: G.all_gather.default,
}
