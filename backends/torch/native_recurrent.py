"""The kernels for steps of recurrences and convolutions as torch ops, as those of `native` are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir import InputError
from ...ir.ops import causal_conv, recurrent, rounded_state
from ...ir.ops.causal_conv import check_conv_step
from ...ir.ops.recurrent import check_step
from ...ir.ops.rounded_state import check_rounded
from ..cached_library import SHARED
from .native import F32, Kernel, native_op

linear_attention_step_kernel = Kernel("linear_attention_step", SHARED)
linear_attention_step_int8_kernel = Kernel("linear_attention_step_int8", SHARED)
causal_conv_step_kernel = Kernel("causal_conv_step", SHARED)


def _like(
    state: Tensor, keys: Tensor, values: Tensor, decays: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (others[6], state, keys, values, decays))


def _sizes(sequence: tuple[Any, ...], keys: Tensor) -> tuple[int, ...]:
    """B, H, G, T, K, V, D and W, of k, v and g and the log's keys."""
    k, v, g = sequence
    batch, groups, width, size = k.shape
    return batch, v.shape[1], groups, width, size, v.shape[3], g.shape[3], keys.shape[2]


def _check(*operands: Any) -> None:
    check_step(*operands)
    for x in operands[8:13]:
        if x is not None and x.dtype != F32:
            raise InputError(f"linear_attention_step: the kernel takes {F32}, got {x.dtype}")


@native_op(
    "linear_attention_step(Tensor state, Tensor keys, Tensor values, Tensor decays, Tensor folded, "
    "Tensor past, Tensor certain, Tensor? ancestors, Tensor q, Tensor k, Tensor v, Tensor g, "
    "Tensor? beta) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check,
    _like,
)
def linear_attention_step(*operands: Any) -> tuple[Tensor, ...]:
    """`graftwork.linear_attention_step` in float32."""
    results = _like(*operands)
    sizes = _sizes(operands[9:12], operands[1])
    linear_attention_step_kernel(*operands, *results, *sizes, torch.get_num_threads())
    return results


STEP = torch.ops.graftwork_native.linear_attention_step.default


def step(*operands: Any) -> Any:
    """`graftwork.linear_attention_step`; native in float32."""
    given = (*operands, None)[:13]
    if any(x is not None and x.dtype != F32 for x in given[8:]):
        return recurrent.linear_attention_step(*operands)
    return linear_attention_step(*given)


def _like_int8(codes: Tensor, scale: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (others[9], codes, scale, *others[:3]))


def _check_int8(*operands: Any) -> None:
    check_rounded(*operands)
    for x in operands[9:]:
        if x is not None and x.dtype != F32:
            raise InputError(f"linear_attention_step_int8: the kernel takes {F32}, got {x.dtype}")


@native_op(
    "linear_attention_step_int8(Tensor codes, Tensor scale, Tensor keys, Tensor values, "
    "Tensor decays, Tensor folded, Tensor past, Tensor certain, Tensor? ancestors, Tensor q, "
    "Tensor k, Tensor v, Tensor g, Tensor? beta) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _check_int8,
    _like_int8,
)
def linear_attention_step_int8(*operands: Any) -> tuple[Tensor, ...]:
    """`graftwork.linear_attention_step_int8` of tokens in float32."""
    results = _like_int8(*operands)
    sizes = _sizes(operands[10:13], operands[2])
    linear_attention_step_int8_kernel(*operands, *results, *sizes, torch.get_num_threads())
    return results


def step_int8(*operands: Any) -> Any:
    """`graftwork.linear_attention_step_int8`; native for tokens in float32."""
    given = (*operands, None)[:14]
    if any(x is not None and x.dtype != F32 for x in given[9:]):
        return rounded_state.linear_attention_step_int8(*operands)
    return linear_attention_step_int8(*given)


def _like_conv(history: Tensor, rows: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (others[4], history, rows))


def _check_conv(*operands: Any) -> None:
    check_conv_step(*operands)
    if not _conv_in_float32(operands):
        raise InputError(f"causal_conv_step: the kernel takes {F32}")


def _conv_in_float32(operands: Any) -> bool:
    """Whether states, tokens, weight and bias are."""
    return all(x is None or x.dtype == F32 for x in (*operands[:2], *operands[6:]))


@native_op(
    "causal_conv_step(Tensor history, Tensor rows, Tensor folded, Tensor past, Tensor certain, "
    "Tensor? ancestors, Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor)",
    _check_conv,
    _like_conv,
)
def causal_conv_step(*operands: Any) -> tuple[Tensor, ...]:
    """`graftwork.causal_conv_step` in float32."""
    results = _like_conv(*operands)
    sizes = *operands[6].shape, operands[7].shape[1], operands[1].shape[1]
    causal_conv_step_kernel(*operands, *results, *sizes, torch.get_num_threads())
    return results


def conv_step(*operands: Any) -> Any:
    """`graftwork.causal_conv_step`; native in float32."""
    given = (*operands, None)[:9]
    if not _conv_in_float32(given):
        return causal_conv.causal_conv_step(*operands)
    return causal_conv_step(*given)
