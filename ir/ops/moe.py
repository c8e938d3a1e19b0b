"""A sparse mixture of gated feed-forward experts, after the router has chosen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .mlp import activate, check_activation
from .operands import Operands


def _samples() -> Iterator[Sample]:
    gate_up, down = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    biases = (torch.randn(4, 12), torch.randn(4, 8))
    for rows, extra, options in (
        (1, (), {"activation": "silu"}),
        (5, (), {"activation": "gelu"}),
        (5, biases, {"activation": "silu", "limit": 1.0, "alpha": 1.702}),
        (2, (), {"activation": "silu", "limit": 0.5}),
    ):
        experts = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
        x, weights = torch.randn(rows, 8), torch.rand(rows, 2)
        yield (x, experts, weights, gate_up, down, *extra), options


def gated(
    hidden: Tensor, activation: str, limit: float | None = None, alpha: float | None = None
) -> Tensor:
    """The gated activation [...,F] of gate and up, concatenated [...,2F] (see `moe`)."""
    gate, up = hidden.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if alpha is not None:
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    return activate(gate, activation) * up


def expert_hidden(
    x: Tensor,
    gate_up: Tensor,
    bias: Tensor | None,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """One expert's hidden values [N,F] for rows [N,H]; gate_up [2F,H]."""
    return gated(torch.nn.functional.linear(x, gate_up, bias), activation, limit, alpha)


def _check(given: Operands, activation: str, alpha: float | None) -> None:
    if alpha is None:
        check_activation(activation)
    rows, inner = given.sizes["G"], given.sizes["F"]
    if rows != 2 * inner:
        raise InputError(f"{given.op}: gate_up must have 2F={2 * inner} rows an expert, got {rows}")


@op(
    "x: NH, experts: i64 NK, weights: NK, gate_up: x EGH, down: x EHF, gate_up_bias: x EG, "
    "down_bias: x EH -> x",
    samples=_samples,
    also=_check,
)
def moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
) -> Tensor:
    """Weighted sum of the chosen experts' outputs for each token.

    ``%y: f32[B*T,H] = graftwork.moe(%x, %experts, %w, @gate_up, @down, activation="silu")``

    x [N,H]; experts i64[N,K], distinct in a row, in 0..E-1; weights [N,K]; gate_up [E,2F,H], rows
    0..F-1 the gate and F..2F-1 the up projection; down [E,H,F]; gate_up_bias [E,2F]; down_bias
    [E,H]. An expert computes ``down(activation(gate) * up)``. `limit` clamps gate from above and up
    on both sides; with `alpha` it is ``(up + 1) * gate * sigmoid(alpha * gate)`` (gpt-oss).
    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017).
    """
    rows, chosen = experts.shape
    how = activation, limit, alpha
    # Few tokens: read the chosen experts only. Many: run every expert.
    if rows * chosen <= gate_up.shape[0]:
        hidden = torch.einsum("nh,nkfh->nkf", x, gate_up[experts])
        hidden = hidden if gate_up_bias is None else hidden + gate_up_bias[experts]
        out = torch.einsum("nkf,nkhf->nkh", gated(hidden, *how), down[experts])
        out = out if down_bias is None else out + down_bias[experts]
        return (out * weights[..., None]).sum(1).to(x.dtype)
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for expert in range(gate_up.shape[0]):
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = expert_hidden(x, gate_up[expert], bias, *how)
        bias = None if down_bias is None else down_bias[expert]
        out = torch.nn.functional.linear(hidden, down[expert], bias)
        share = (weights * (experts == expert)).sum(1)
        total = total + out * share[:, None]
    return total.to(x.dtype)
