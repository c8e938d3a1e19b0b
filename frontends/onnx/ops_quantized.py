"""ONNX ops on weights of few bits, which are kept in them (see `frontends.stored_weights`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as oir
import torch
import torch.nn.functional as F

from ...ir import UnsupportedError, Weight
from ...ir.ops.numerics import Numeric, pack
from ..stored_weights import StoredWeight
from .table import MICROSOFT, Context, op
from .values import Numbers, Value, operand, tensor


def stored(
    name: str, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, bits: int
) -> StoredWeight:
    """codes [N,K] unsigned; scale [N,G]; zero points [N,G], None: in the middle."""
    wide = torch.from_numpy(np.array(codes)).to(torch.int32)
    scales = torch.from_numpy(np.array(scale))
    scales = scales if scales.dtype == torch.float16 else scales.float()
    group = codes.shape[1] // scale.shape[1]
    middle = 2.0 ** (bits - 1)
    offset = None
    if zero is not None and not bool((zero == middle).all()):
        zeros = torch.from_numpy(np.array(zero)).to(scales.dtype)
        offset = Weight.of(f"{name}.offset", -scales * zeros)
    kind = "symmetric" if offset is None else "affine"
    return StoredWeight(
        Numeric(bits, group, kind, scales.dtype),
        Weight.of(name, pack(wide, bits)),
        Weight.of(f"{name}.scale", scales),
        offset,
    )


def nibbles(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first `count` numbers of each row of bytes, the lowest bits first."""
    each = 8 // bits
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(each)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)[..., :count]


def constant(c: Context, index: int) -> np.ndarray:
    """The data of an input that is a constant, or one in another shape: tables that are also heads
    are laid out for these."""
    value = c.node.inputs[index]
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Reshape":
        return _data(value, index)
    return _data(node.inputs[0], index).reshape(_data(node.inputs[1], index).tolist())


def _data(value: oir.Value | None, index: int) -> np.ndarray:
    found = None if value is None else oir.convenience.get_const_tensor(value)
    if found is None:
        raise UnsupportedError(f"input {index} of a weight of few bits is no constant")
    array: np.ndarray = found.numpy()
    return array


def _given(c: Context, index: int) -> bool:
    return index < len(c.node.inputs) and c.node.inputs[index] is not None


@op("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(c: Context, x: Value, *_: Value) -> Value:
    bits, block = c.attribute("bits", 4), c.attribute("block_size")
    rows, columns = c.attribute("N"), c.attribute("K")
    if columns % block or bits not in (2, 4, 8) or _given(c, 4):
        raise UnsupportedError(
            f"MatMulNBits of {bits} bits, K={columns} in blocks of {block}, with an order of "
            f"channels: {_given(c, 4)}"
        )
    groups = columns // block

    def make() -> StoredWeight:
        codes = nibbles(constant(c, 1).reshape(rows, -1), bits, columns)
        zero = None
        if _given(c, 3):
            zero = constant(c, 3)
            packed = zero.dtype == np.uint8
            zero = nibbles(zero.reshape(rows, -1), bits, groups) if packed else zero
            zero = zero.reshape(rows, groups)
        scale = constant(c, 2).reshape(rows, groups)
        return stored(c.name_of(1), codes, scale, zero, bits)

    weight = c.store(c.name_of(1), (rows, columns), make)
    bias = torch.from_numpy(constant(c, 5).copy()) if _given(c, 5) else None
    return F.linear(tensor(x), weight.tensor, bias)


@op("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(c: Context, table: Value, index: Value, *_: Value) -> Value:
    bits, block = c.attribute("bits", 4), c.attribute("block_size", 128)

    def make() -> StoredWeight:
        data = constant(c, 0)
        codes = nibbles(data, bits, data.shape[-1] * 8 // bits) if data.dtype == np.uint8 else data
        codes = codes.astype(np.int32)
        if codes.min() < 0:
            codes = codes + 2 ** (bits - 1)
        zero = None
        if _given(c, 3):
            zero = constant(c, 3)
            packed = zero.dtype == np.uint8 and bits < 8
            zero = nibbles(zero, bits, codes.shape[1] // block) if packed else zero
        return stored(c.name_of(0), codes, constant(c, 2), zero, bits)

    shape = constant(c, 0).shape
    each = 8 // bits if constant(c, 0).dtype == np.uint8 else 1
    weight = c.store(c.name_of(0), (shape[0], shape[1] * each), make)
    return F.embedding(tensor(index).long(), weight.tensor)


@op("DequantizeLinear")
def dequantize_linear(c: Context, x: Value, scale: Value, zero: Value = None) -> Value:
    axis, block = c.attribute("axis", 1), c.attribute("block_size", 0)
    if axis != 0 or not block:
        raise UnsupportedError("DequantizeLinear otherwise than in blocks along a weight [K,N]")

    def make() -> StoredWeight:
        codes = constant(c, 0)
        bits = 4 if "int4" in str(codes.dtype) else 8
        signed = np.dtype(np.int8) == codes.dtype or str(codes.dtype) == "int4"
        more = 2 ** (bits - 1) if signed else 0
        zeros = constant(c, 2).astype(np.int32) + more if _given(c, 2) else None
        if zeros is None:
            shape = constant(c, 1).shape
            zeros = np.full(shape, more, np.int32)
        return stored(
            c.name_of(0), codes.astype(np.int32).T + more, constant(c, 1).T, zeros.T, bits
        )

    # As it lies in products: [N,K].
    columns, rows = constant(c, 0).shape
    return replace(c.store(c.name_of(0), (rows, columns), make), turned=True)


@op("QuantizeLinear")
def quantize_linear(c: Context, x: Value, scale: Value, zero: Value = None) -> Value:
    """The whole numbers, as floats: products with them are exact."""
    middle = 0 if zero is None else operand(zero)
    if isinstance(middle, torch.Tensor):
        middle = middle.float()
    return torch.round(tensor(x) / operand(scale)) + middle


@op("MatMulIntegerToFloat", domain=MICROSOFT)
def integer_product(
    c: Context,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero: Value = None,
    b_zero: Value = None,
    bias: Value = None,
) -> Value:
    by = a_scale.one if isinstance(a_scale, Numbers) else None
    if by is None or bias is not None:
        raise UnsupportedError("MatMulIntegerToFloat with a bias, or scales of its rows")
    columns, rows = constant(c, 1).shape
    weight = c.store(c.name_of(1), (rows, columns), _bytes(c, 1, 3, 5))
    centred = tensor(a) - (0 if a_zero is None else operand(a_zero))
    made = F.linear(centred, weight.tensor)
    return made if by == 1 else made * by


def _bytes(c: Context, data: int, scale: int, zero: int) -> Callable[[], StoredWeight]:
    def make() -> StoredWeight:
        codes = constant(c, data)
        more = 128 if codes.dtype == np.int8 else 0
        middle = (int(constant(c, zero).reshape(-1)[0]) if _given(c, zero) else 0) + more
        scales = constant(c, scale).reshape(-1, 1)
        zeros = np.full(scales.shape, middle, np.int32)
        return stored(c.name_of(data), codes.astype(np.int32).T + more, scales, zeros, 8)

    return make
