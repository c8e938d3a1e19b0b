"""Causal convolutions, with the last tokens' values as a state.

Values that may be rolled back are kept in a log, see `recurrent`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Native, Sample, op
from .operands import Operands
from .recurrent import COUNTS, pending, rows_after


def _conv_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 5, 3), torch.randn(3, 4)), {"layer": 0}
    yield (torch.randn(2, 5, 3), torch.randn(3, 2), torch.randn(3)), {"layer": 1}


def _check(given: Operands) -> None:
    if given.sizes["N"] < 2:
        raise InputError(
            f"{given.op}: weight must span at least 2 tokens, got [D,{given.sizes['N']}]"
        )


@op("x: BTD, weight: DN, bias: D -> x", samples=_conv_samples, also=_check)
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layer: int) -> Tensor:
    """Depthwise causal convolution: per channel, a weighted sum over a token and those before it.

    ``%y: f32[B,T,D] = graftwork.causal_conv(%x, @weight, layer=0)``

    x [B,T,D]; weight [D,N], the last column for the token itself; bias [D]. Values before the
    sequence are 0. layer: owner of the state of the last N-1 values.
    """
    nothing = x.new_zeros((x.shape[0], weight.shape[1] - 1, x.shape[2]))
    return _convolved(nothing, x, weight, bias, None)


def _convolved(
    history: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, ancestors: Tensor | None
) -> Tensor:
    """Sums over a token and its N-1 ancestors; history [B,N-1,D]: values before the step."""
    span, width = weight.shape[1], x.shape[1]
    everything = torch.cat([history, x], 1)
    total = None
    for distance in range(span):
        if ancestors is None:
            part = everything.narrow(1, span - 1 - distance, width)
        else:
            part = torch.matmul(_at(ancestors, distance, span).to(x.dtype), everything)
        term = part * weight[:, span - 1 - distance]
        total = term if total is None else total + term
    assert total is not None
    total = total if bias is None else total + bias
    return total.to(x.dtype)


def _at(ancestors: Tensor, distance: int, span: int) -> Tensor:
    """bool[B,T,N-1+T]: the row of [history, step] that is `distance` before each token."""
    depth = ancestors.long().sum(2)
    places = torch.arange(span - 1, device=ancestors.device)
    wanted = span - 2 - (distance - depth)
    outside = (places == wanted[:, :, None]) & (depth <= distance)[:, :, None]
    inside = ancestors & (depth[:, None, :] == (depth - distance)[:, :, None])
    return torch.cat([outside, inside], 2)


def _conv_step_samples() -> Iterator[Sample]:
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, 3, 3)
    counts = torch.tensor([4, 0]), torch.tensor([6, 0]), torch.tensor([1, 3])
    for ancestors in (None, tree):
        history, rows, x = torch.randn(2, 3, 5), torch.randn(2, 2, 5), torch.randn(2, 3, 5)
        weight, bias = torch.randn(5, 4), torch.randn(5)
        yield (history, rows, *counts, ancestors, x, weight, bias), {}


@op(
    f"x: BTD, weight: DN, bias: D, also, P = N - 1, history: BPD, rows: BWD, {COUNTS} -> x, "
    "history, rows",
    samples=_conv_step_samples,
    also=_check,
    native=Native("BTDNW"),
)
def causal_conv_step(
    history: Tensor,
    rows: Tensor,
    folded: Tensor,
    past: Tensor,
    certain: Tensor,
    ancestors: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of `causal_conv`, with the history and log after it.

    ``%y, %h, %r = graftwork.causal_conv_step(%history, %rows, %folded, %past, %certain, None, %x,
    @weight)``

    history [B,N-1,D] holds the values of the last rows before row `folded` i64[B], the log rows
    [B,W,D] those from there on. past, certain and ancestors as in `linear_attention_step`; x
    [B,T,D], weight and bias as in `causal_conv`. Results: y [B,T,D], the new history and log.
    """
    span = weight.shape[1]
    begun = (past > 0)[:, None, None]
    held = torch.cat([history, rows], 1)
    before = (
        rows_after(held, pending(folded, past), span - 1, 1).masked_fill(~begun, 0.0).to(x.dtype)
    )
    y = _convolved(before, x, weight, bias, ancestors)
    after = rows_after(torch.cat([before, x], 1), certain, span - 1, 1)
    logged = rows_after(x, certain, rows.shape[1], 1)
    return y, after.to(history.dtype), logged.to(rows.dtype)
