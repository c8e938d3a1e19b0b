"""The kernels for steps of recurrences and convolutions as torch ops, as those of `native` are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cached_library import SHARED
from .native import Kernel, native_op, twin

linear_attention_step_kernel = Kernel("linear_attention_step", SHARED)
linear_attention_step_int8_kernel = Kernel("linear_attention_step_int8", SHARED)
causal_conv_step_kernel = Kernel("causal_conv_step", SHARED)


def _sizes(sequence: tuple[Any, ...], keys: Tensor) -> tuple[int, ...]:
    """B, H, G, T, K, V, D and W, of k, v and g and the log's keys."""
    k, v, g = sequence
    batch, groups, width, size = k.shape
    return batch, v.shape[1], groups, width, size, v.shape[3], g.shape[3], keys.shape[2]


@native_op(*twin("linear_attention_step", "q k v g beta"))
def linear_attention_step(results: tuple[Tensor, ...], *operands: Any) -> None:
    """`graftwork.linear_attention_step` in float32."""
    sizes = _sizes(operands[9:12], operands[1])
    linear_attention_step_kernel(*operands, *results, *sizes, torch.get_num_threads())


STEP = torch.ops.graftwork_native.linear_attention_step.default


@native_op(*twin("linear_attention_step_int8", "q k v g beta"))
def linear_attention_step_int8(results: tuple[Tensor, ...], *operands: Any) -> None:
    """`graftwork.linear_attention_step_int8` of tokens in float32."""
    sizes = _sizes(operands[10:13], operands[2])
    linear_attention_step_int8_kernel(*operands, *results, *sizes, torch.get_num_threads())


@native_op(*twin("causal_conv_step", "history rows x weight bias"))
def causal_conv_step(results: tuple[Tensor, ...], *operands: Any) -> None:
    """`graftwork.causal_conv_step` in float32."""
    sizes = *operands[6].shape, operands[7].shape[1], operands[1].shape[1]
    causal_conv_step_kernel(*operands, *results, *sizes, torch.get_num_threads())
