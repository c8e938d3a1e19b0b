"""Convolutions along one axis of a fixed size, as products of what lies under each window.

Before::

    %y: f32[B,O,M] = aten.conv1d(%x, @weight, @bias, [2], [1])        x f32[B,I,N], weight [O,I,K]

After, with the axis before the channels, and the K rows of a window side by side::

    %w: f32[B,M,K*I] = aten.cat([%rows 0 ... by 2, %rows 1 ... by 2, ...], -1)
    %y: f32[B,M,O] = aten.linear(%w, @weight.reshaped, @bias)

So a weight of theirs is one of a product, and quantized like any other.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir import InputError, UnsupportedError
from .aten import Call, lowers

A = torch.ops.aten


@lowers(A.conv1d.default)
def conv1d(call: Call) -> Any:
    """See the module docstring. Errors: `UnsupportedError` for groups, and sizes that vary."""
    b, (x, weight) = call.b, call.args[:2]
    stride, padding, dilation = (
        int(call.arg(index, name, [usual])[0])
        for index, name, usual in ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))
    )
    batch, channels, length = b.shape(x)
    outputs, _, size = (int(str(dim)) for dim in b.shape(weight))
    if call.arg(6, "groups", 1) != 1 or not isinstance(length, int):
        raise UnsupportedError(
            f"a convolution in groups, or over {length} rows, is not supported yet; expected one "
            "of all channels over a fixed number of rows"
        )
    rows = b.permute(x, [0, 2, 1])
    if padding:
        zeros = b.call(A.full.default, [batch, padding, channels], 0.0, dtype=call.dtype)
        rows = b.call(A.cat.default, [zeros, rows, zeros], 1)
    count = (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
    if count < 1:
        raise InputError(f"a window of {size} does not fit into {length} rows")
    reach = (count - 1) * stride + 1
    starts = [place * dilation for place in range(size)]
    parts = [b.call(A.slice.Tensor, rows, 1, s, s + reach, stride) for s in starts]
    windows = b.call(A.cat.default, parts, -1)
    flat = b.reshape(b.permute(weight, [0, 2, 1]), [outputs, size * int(str(channels))])
    return b.permute(b.call(A.linear.default, windows, flat, call.arg(2, "bias")), [0, 2, 1])
