"""Mixtures of experts with quantized weights, and their products.

`numerics` documents the bit layout. Activations are quantized by row and sums are exact, as in
`quantized_linear`, so a token's result does not depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .mlp import check_activation
from .moe import gated
from .numerics import Numeric, check_bits
from .operands import Operands
from .quantized import check_sizes, check_span, half_or_float, quantized_linear


def _stacks(experts: int, rows: int, columns: int, numeric: Numeric) -> tuple[Tensor | None, ...]:
    """A random stack of experts: weight, scale and offset."""
    found = numeric.quantize(torch.randn(experts * rows, columns))[:3]
    return tuple(part if part is None else part.unflatten(0, (experts, rows)) for part in found)


AFFINE = Numeric(4, 8, "affine", torch.float16)


def _product_samples() -> Iterator[Sample]:
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1]])
    affine, symmetric = _stacks(3, 16, 24, AFFINE), _stacks(3, 6, 16, Numeric(8, 16))
    options = {"bits": 4, "group": 8}
    yield (torch.randn(3, 24), chosen, *affine), options
    yield (torch.randn(3, 2, 24), chosen, *affine, torch.randn(3, 16)), options
    yield (torch.randn(3, 16), chosen, *symmetric), {"bits": 8, "group": 16}
    yield (torch.randn(3, 24), chosen, *affine), {**options, "rounded": False}


def _fit_stack(
    given: Operands,
    name: str,
    stack: tuple[Tensor, Tensor, Tensor | None],
    bits: int,
    group: int,
    axes: str,
) -> None:
    """Check weight, scale and offset of a stack. axes: letters of experts, rows and columns, and of
    bytes and groups of a row."""
    outer, inner, packed, groups = axes[:2], *axes[2:]
    weight, scale, offset = stack
    check_bits(bits)
    columns = given.sizes.get(inner, weight.shape[-1] * 8 // bits)
    check_sizes(given, columns, bits, group, axes[2:])
    given.fit(name, weight, outer + packed, torch.uint8)
    given.fit(f"{name}_scale", scale, outer + groups, half_or_float(scale))
    given.fit(f"{name}_offset", offset, outer + groups, half_or_float(offset))


def _check_experts(
    given: Operands,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bits: int,
    group: int,
    span: int,
) -> None:
    given.fit("x", x, "NK" if x.dim() == 2 else "NCK")
    check_span(given.op, span, given.sizes["K"], group)
    _fit_stack(given, "weight", (weight, scale, offset), bits, group, "ERKPU")


@op(
    "experts: i64 NC, also, bias: ER -> x NCR",
    samples=_product_samples,
    also=_check_experts,
    stored=("weight",),
)
def quantized_experts(
    x: Tensor,
    experts: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int,
    rounded: bool = True,
    span: int = 0,
) -> Tensor:
    """Each row times the quantized weights of its chosen experts: [N,C,R].

    ``%y: f32[B*T,2,R] = graftwork.quantized_experts(%x, %experts, @w.q4, @w.scale, @w.offset,
    bits=4, group=32)``

    x [N,K], or [N,C,K] with a row for each choice; experts i64[N,C] in 0..E-1; weight
    u8[E,R,K*bits/8], scale and offset f32|f16[E,R,K/group], bias [E,R]; bits, group, rounded
    and span as in `quantized_linear`, whose result each is.
    """
    rows = x if x.dim() == 3 else x.unsqueeze(1).expand(*experts.shape, x.shape[1])
    found = x.new_zeros((*experts.shape, weight.shape[1]))
    for expert in range(weight.shape[0]):
        parts = (None if part is None else part[expert] for part in (weight, scale, offset))
        own = None if bias is None else bias[expert]
        options = {"bits": bits, "group": group, "rounded": rounded, "span": span}
        of_it = quantized_linear(rows, *parts, None, own, **options)
        found = torch.where((experts == expert).unsqueeze(-1), of_it, found)
    return found


def _samples() -> Iterator[Sample]:
    gate_up, down = _stacks(4, 32, 16, AFFINE), _stacks(4, 16, 16, AFFINE)
    biases = (torch.randn(4, 32), torch.randn(4, 16))
    options = {"activation": "silu", "bits": 4, "group": 8, "down_group": 8}
    for rows, extra, more in (
        (1, (), {}),
        (5, biases, {"limit": 1.0, "alpha": 1.702}),
        (3, (), {"activation": "gelu", "rounded": False}),
        (2, biases, {"span": 16}),
    ):
        experts = torch.stack([torch.randperm(4)[:2] for _ in range(rows)])
        x, weights = torch.randn(rows, 16), torch.rand(rows, 2)
        yield (x, experts, weights, *gate_up, *down, *extra), options | more


def _check(
    given: Operands,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_offset: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_offset: Tensor | None,
    activation: str,
    bits: int,
    group: int,
    down_group: int,
    alpha: float | None,
    span: int,
) -> None:
    if alpha is None:
        check_activation(activation)
    _fit_stack(given, "gate_up", (gate_up, gate_up_scale, gate_up_offset), bits, group, "EGHPU")
    if given.sizes["G"] % 2:
        raise InputError(f"{given.op}: gate_up must have 2F rows, got {given.sizes['G']}")
    given.sizes["F"] = given.sizes["G"] // 2
    _fit_stack(given, "down", (down, down_scale, down_offset), bits, down_group, "EHFQV")
    check_span(given.op, span, given.sizes["H"], group)
    check_span(given.op, span, given.sizes["F"], down_group)


@op(
    "x: NH, experts: i64 NC, weights: NC, also, gate_up_bias: EG, down_bias: EH -> x",
    samples=_samples,
    also=_check,
    stored=("gate_up", "down"),
)
def quantized_moe(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    gate_up_offset: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_offset: Tensor | None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str,
    bits: int,
    group: int,
    down_group: int,
    limit: float | None = None,
    alpha: float | None = None,
    rounded: bool = True,
    span: int = 0,
) -> Tensor:
    """`moe` with quantized weights.

    ``%y: f32[B*T,H] = graftwork.quantized_moe(%x, %experts, %w, @gate_up.q4, @gate_up.q4.scale,
    @gate_up.q4.offset, @down.q4, @down.q4.scale, @down.q4.offset, activation="silu", bits=4,
    group=32, down_group=32)``

    x [N,H]; experts i64[N,C] in 0..E-1; weights [N,C]; gate_up u8[E,2F,H*bits/8] with gate_up_scale
    and gate_up_offset f32|f16[E,2F,H/group]; down u8[E,H,F*bits/8] with down_scale and down_offset
    [E,H,F/down_group]; gate_up_bias [E,2F] and down_bias [E,H], activation, limit and alpha as in
    `moe`; bits, rounded and span as in `quantized_linear`.
    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); for experts in few bits,
    Kim et al., "Mixture of Quantized Experts (MoQE)" (2023).
    """
    given = {"bits": bits, "rounded": rounded, "span": span}
    product = torch.ops.graftwork.quantized_experts
    first = (x, experts, gate_up, gate_up_scale, gate_up_offset, gate_up_bias)
    hidden = gated(product(*first, group=group, **given), activation, limit, alpha)
    second = (hidden, experts, down, down_scale, down_offset, down_bias)
    out = product(*second, group=down_group, **given)
    total: Tensor = (out * weights.unsqueeze(-1)).sum(1)
    return total.to(x.dtype)
