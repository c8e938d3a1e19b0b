"""Random calls of the kernels for weights of few bits (see `kernels`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftwork.backends.torch import native_quantized

sys.path.append(str(Path(__file__).parents[1]))
import quantized  # the tests' own
from operands import F32, I8, Case, Maker, want

SAME = {"rtol": 0.0, "atol": 0.0}
NEAR = {"rtol": 1e-4, "atol": 1e-3}
"""Of sums of floats, which the meaning takes in another order."""


def _weight(make: Maker) -> quantized.Weight:
    bits, kind = make.random.choice(quantized.BITS), make.random.choice(quantized.KINDS)
    group, groups = make.random.choice((1, 3, 4, 8, 16, 20, 32, 130)), make.random.choice((1, 2, 3))
    half, bias = (make.random.random() < 0.5 for _ in range(2))
    seed, outputs = make.random.randrange(1000), make.size()
    return quantized.weight(seed, outputs, group, groups, bits, kind, half=half, bias=bias)


def _spoilt(make: Maker, sizes: tuple[int, int, int]) -> dict[str, int]:
    """Bits, group and outputs, one of them perhaps another."""
    options = dict(zip(("bits", "group", "outputs"), sizes, strict=True))
    if make.random.random() < 0.2:
        name = make.random.choice(tuple(options))
        options[name] += make.random.choice((-options[name], -1, 1, 16, 1 << 40))
    return options


def _stored(
    x: Tensor,
    tensors: tuple[Any, ...],
    codebook: Tensor | None,
    *,
    bits: int,
    group: int,
    outputs: int,
) -> quantized.Weight:
    """The weight of a product, whose operands but the codebook are looked at."""
    packed, scale, offset, _, bias = tensors
    want(bits in quantized.BITS and 0 < group <= 1 << 16 and outputs >= 0)
    want(x.dtype == F32 and x.shape[-1] > 0 and x.shape[-1] % group == 0)
    shape = (-(-outputs // 16), x.shape[-1] // group)
    want(packed.dtype == torch.uint8)
    want(packed.shape == (*shape, -(-group // 16) * 32 * bits))
    for columns in (scale, offset):
        fits = columns is None or columns.dtype in (F32, torch.float16)
        want(fits and (columns is None or columns.shape == (*shape, 16)))
    want(bias is None or (bias.dtype == F32 and bias.shape == (outputs,)))
    rows = [None if c is None else c.mT.flatten(0, 1)[:outputs] for c in (scale, offset)]
    q = quantized.from_tiles(packed, bits, group, outputs)
    return quantized.Weight(q, packed, *rows, codebook, bias, bits, group)


def native_quantized_linear(make: Maker) -> Case:
    w = _weight(make)
    names = ("packed", "scale", "offset", "table", "bias")
    operands = dict(zip(names, w.in_tiles(), strict=True))

    def meaning(x: Tensor, *tensors: Any, bits: int, **sizes: int) -> Tensor:
        _, _, offset, table, _ = tensors
        want(table is None or (table.dtype == I8 and table.shape == (16,)))
        want(table is None or (offset is None and bits <= 4))
        codebook = None if table is None else table[: 1 << bits].float()
        return quantized.linear(x, _stored(x, tensors, codebook, bits=bits, **sizes))

    def call(*tensors: Any, bits: int, group: int, outputs: int) -> Any:
        return native_quantized.quantized_linear(*tensors, bits, group, outputs)

    operands = {"x": make.numbers(*make.rows(), w.q.shape[1]), **operands}
    options = _spoilt(make, w.sizes)
    return Case("quantized_linear", call, meaning, operands, options, fake=True, tolerance=SAME)


def native_float_linear(make: Maker) -> Case:
    w = _weight(make)
    names = ("packed", "scale", "offset", "codebook", "bias")
    operands = dict(zip(names, (*w.table_in_tiles(), w.bias), strict=True))

    def meaning(x: Tensor, *tensors: Any, bits: int, **sizes: int) -> Tensor:
        _, _, offset, codebook, bias = tensors
        want(bits in quantized.BITS)
        want(codebook is None or (codebook.dtype == F32 and codebook.shape == (1 << bits,)))
        want(codebook is None or offset is None)
        stored = _stored(x, tensors, codebook, bits=bits, **sizes)
        found = (x.double() @ quantized.table(stored).double().T).float()
        return found if bias is None else found + bias

    def call(*tensors: Any, bits: int, group: int, outputs: int) -> Any:
        return native_quantized.float_linear(*tensors, bits, group, outputs)

    operands = {"x": make.numbers(*make.rows(), w.q.shape[1]), **operands}
    options = _spoilt(make, w.table_sizes)
    return Case("float_linear", call, meaning, operands, options, fake=True, tolerance=NEAR)


def native_quantized_experts(make: Maker) -> Case:
    bits, rounded = make.random.choice(quantized.BITS), make.random.random() < 0.5
    kind = make.random.choice(("symmetric", "offset"))
    experts, outputs = make.random.choice((1, 2, 5)), 16 * make.random.choice((1, 2, 3))
    group, seed = make.random.choice((3, 8, 16, 20, 32)), make.random.randrange(1000)
    w = quantized.weight(seed, experts * outputs, group, 2, bits, kind)
    packed, scale, offset, _ = w.table_in_tiles()
    rows, choices = make.random.choice((0, 1, 2, 9)), make.random.choice((1, 2, 3))
    low = -1 if make.random.random() < 0.1 else 0
    chosen = torch.randint(low, experts, (rows, choices), generator=make.generator)
    each = make.random.random() < 0.5
    x = make.numbers(*((rows, choices) if each else (rows,)), w.q.shape[1])
    bias = make.maybe(make.numbers(experts, outputs))
    operands = {"x": x, "experts": chosen, "packed": packed, "scale": scale}
    operands |= {"offset": offset, "bias": bias}

    def meaning(x: Tensor, chosen: Tensor, *tensors: Any, rounded: bool, **sizes: int) -> Tensor:
        packed, scale, offset, bias = tensors
        outputs = sizes["outputs"]
        want(outputs > 0 and outputs % 16 == 0 and packed.dim() == 3)
        want(packed.shape[0] * 16 % outputs == 0)
        count = packed.shape[0] * 16 // outputs
        want(chosen.dim() == 2 and chosen.dtype == torch.int64)
        want(x.dim() in (2, 3) and x.shape[:-1] == chosen.shape[: x.dim() - 1])
        want(bias is None or (bias.dtype == F32 and bias.shape == (count, outputs)))
        given = packed, scale, offset, None, None
        all_sizes = sizes | {"outputs": count * outputs}
        stored = _stored(x, given, None, **all_sizes)
        want(bool(((chosen >= 0) & (chosen < count)).all()))
        rows = x if x.dim() == 3 else x[:, None].expand(*chosen.shape, x.shape[-1])
        if rounded:
            every = quantized.linear(rows, stored)
        else:
            every = (rows.double() @ quantized.table(stored).double().T).float()
        every = every.unflatten(-1, (count, outputs))
        every = every if bias is None else every + bias
        index = chosen[..., None, None].expand(*chosen.shape, 1, outputs)
        return every.gather(2, index).squeeze(2)

    def call(*tensors: Any, bits: int, group: int, outputs: int, rounded: bool) -> Any:
        return native_quantized.quantized_experts(*tensors, bits, group, outputs, rounded)

    options: dict[str, Any] = _spoilt(make, (bits, group, outputs))
    near = SAME if rounded else NEAR
    options |= {"rounded": rounded}
    # What experts are there no shape rule knows.
    return Case("quantized_experts", call, meaning, operands, options, tolerance=near)


def native_quantized_embedding(make: Maker) -> Case:
    w = _weight(make)
    low = -1 if make.random.random() < 0.1 else 0
    ids = torch.randint(low, len(w.q) + 1, make.rows(), generator=make.generator)
    ids = ids.clamp(max=max(0, len(w.q) - (make.random.random() < 0.9)))
    packed, scale, offset, codebook = w.table_in_tiles()
    operands = {"ids": ids, "packed": packed, "scale": scale, "offset": offset}
    operands |= {"codebook": codebook}

    def meaning(ids: Tensor, *tensors: Any, bits: int, group: int, outputs: int) -> Tensor:
        packed, scale, offset, codebook = tensors
        want(scale.dim() == 3 and ids.dtype == torch.int64 and packed.dtype == torch.uint8)
        tiles, groups = -(-outputs // 16), scale.shape[1]
        want(groups > 0 and scale.shape == (tiles, groups, 16))
        want(packed.shape == (tiles, groups, -(-group // 16) * 32 * bits))
        want(all(t is None or t.dtype in (F32, torch.float16) for t in (scale, offset)))
        want(offset is None or offset.shape == scale.shape)
        want(codebook is None or (codebook.dtype == F32 and codebook.shape == (1 << bits,)))
        want(codebook is None or offset is None)
        q = quantized.from_tiles(packed, bits, group, outputs)
        by_row = [
            None if t is None else t.mT.reshape(-1, groups)[:outputs] for t in (scale, offset)
        ]
        w = quantized.Weight(q, packed, *by_row, codebook, None, bits, group)
        want(bool(((ids >= 0) & (ids < outputs)).all()))
        return quantized.table(w)[ids]

    def call(*tensors: Any, bits: int, group: int, outputs: int) -> Any:
        return native_quantized.quantized_embedding(*tensors, bits, group, outputs)

    options = dict(zip(("bits", "group", "outputs"), w.table_sizes, strict=True))
    # What ids are worth no shape rule knows.
    return Case("quantized_embedding", call, meaning, operands, options, tolerance=SAME)
