"""Products with weights of few bits in Triton: what `gpu_products` launches.

They read a weight u8[N, K*bits/8] as it is stored (see `ir.ops.numerics`), each byte once, in units
of 4, 3 or 1 bytes that share a scale. A value is level * scale, or level * scale + offset; sums
over units are float32.
"""

# Triton comes without types, and what it compiles takes none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cuda_blocks import Units
from .gpu_products import Way


@triton.jit
def _units(weight, place, there, UNIT: tl.constexpr):
    """The units at some places, i32, the first byte lowest."""
    if UNIT == 3:
        low = tl.load(weight + 3 * place, mask=there, other=0).to(tl.int32)
        middle = tl.load(weight + 3 * place + 1, mask=there, other=0).to(tl.int32)
        high = tl.load(weight + 3 * place + 2, mask=there, other=0).to(tl.int32)
        unit = low | (middle << 8) | (high << 16)
    else:
        unit = tl.load(weight + place, mask=there, other=0).to(tl.int32)
    return unit


@triton.jit
def _level(unit, p: tl.constexpr, book, BITS: tl.constexpr, BOOK: tl.constexpr):
    """The p-th values of units: what is stored, or what it stands for in codebooks. BOOK: 0 without
    one, 1 with an entry for each that is stored, 2 if values stand in pairs."""
    MASK: tl.constexpr = (1 << BITS) - 1
    stored = (unit >> (p * BITS)) & MASK
    if BOOK == 0:
        found = stored
    else:
        if BOOK == 2:
            beside = (unit >> ((p ^ 1) * BITS)) & MASK
            stored += tl.where(beside == (1 << (BITS - 1)), 1 << BITS, 0)
        found = tl.load(book + stored)
    return found


@triton.jit
def _four(unit, p: tl.constexpr, book, BITS: tl.constexpr, BOOK: tl.constexpr):
    """Four values of units as the bytes of an i32: those that are p-th in each byte, or of 3 and 6
    bits those from 4p on."""
    if 8 % BITS == 0 and BOOK == 0:
        MASKS: tl.constexpr = ((1 << BITS) - 1) * 0x01010101 if BITS < 8 else -1
        four = (unit >> (p * BITS)) & MASKS
    else:
        FIRST: tl.constexpr = p if 8 % BITS == 0 else 4 * p
        STRIDE: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 1
        four = _level(unit, FIRST, book, BITS, BOOK).to(tl.int32) & 255
        for j in tl.static_range(1, 4):
            value = _level(unit, FIRST + j * STRIDE, book, BITS, BOOK).to(tl.int32)
            four |= (value & 255) << (8 * j)
    return four


@triton.jit
def _dot4(a, b, total, SIGNED: tl.constexpr, PLAIN: tl.constexpr):
    """total + the sum of a's four signed bytes times b's, which have a sign or not."""
    if PLAIN:
        for j in tl.static_range(4):
            left = (a << (24 - 8 * j)) >> 24
            right = (b << (24 - 8 * j)) >> 24
            total += left * (right if SIGNED else right & 255)
    else:
        CODE: tl.constexpr = "dp4a.s32.s32" if SIGNED else "dp4a.s32.u32"
        total = tl.inline_asm_elementwise(
            CODE + " $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], tl.int32, True, 1
        )
    return total


@triton.jit
def _by_group(product, GROUPS: tl.constexpr):
    """Sums [T,N,GROUPS] of runs of [T,N,C]."""
    T: tl.constexpr = product.shape[0]
    N: tl.constexpr = product.shape[1]
    EACH: tl.constexpr = product.shape[2] // GROUPS
    return tl.sum(tl.reshape(product, [T, N, GROUPS, EACH]), axis=3)


@triton.jit
def few_tokens(
    x,
    weight,
    scale,
    offset,
    book,
    result,
    N,
    U,
    groups,
    run,
    M,
    EACH: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    BOOK: tl.constexpr,
    AFFINE: tl.constexpr,
    MIDDLE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLAIN: tl.constexpr,
):
    """Of M tokens, rounded: x i32[P,M,U] has the four bytes that `_four` takes of a unit.

    A program works out ROWS outputs of TOKENS >= M tokens, COLUMNS units at a time, whose sums are
    whole numbers in GROUPS runs, each of one scale. EACH: units that share a scale. run: outputs
    that share a codebook, i8. MIDDLE: what is taken off levels. PLAIN: without instructions that
    only some devices have.
    """
    PLANES: tl.constexpr = 8 // BITS if 8 % BITS == 0 else 6 // BITS
    t = tl.arange(0, TOKENS)[:, None, None]
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :, None]
    row = n.to(tl.int64)
    books = book + (n // run) * ((1 << BITS) * BOOK)
    total = tl.zeros([TOKENS, ROWS, GROUPS], tl.float32)
    for start in range(0, U, COLUMNS):
        u = start + tl.arange(0, COLUMNS)[None, None, :]
        unit = _units(weight, row * U + u, (n < N) & (u < U), UNIT)
        product = tl.zeros([TOKENS, ROWS, COLUMNS], tl.int32)
        count = tl.zeros([TOKENS, ROWS, COLUMNS], tl.int32)
        for p in tl.static_range(PLANES):
            # As the weight's tile lies: a value serves all rows of a thread.
            place = (p * M + t) * U + u + 0 * n
            values = tl.load(x + place, mask=(t < M) & (u < U), other=0)
            four = tl.broadcast_to(_four(unit, p, books, BITS, BOOK), [TOKENS, ROWS, COLUMNS])
            product = _dot4(values, four, product, BOOK != 0, PLAIN)
            if AFFINE or MIDDLE != 0:
                ones = tl.full([TOKENS, ROWS, COLUMNS], 0x01010101, tl.int32)
                count = _dot4(values, ones, count, True, PLAIN)
        whole = _by_group(product - MIDDLE * count, GROUPS)
        g = (start + tl.arange(0, GROUPS)[None, None, :] * (COLUMNS // GROUPS)) // EACH
        there = (n < N) & (g < groups)
        total += whole.to(tl.float32) * tl.load(scale + row * groups + g, mask=there, other=0.0)
        if AFFINE:
            moved = tl.load(offset + row * groups + g, mask=there, other=0.0)
            total += _by_group(count, GROUPS).to(tl.float32) * moved
    there = (t < M) & (n < N)
    tl.store(result + t * N + n, tl.sum(total, axis=2, keep_dims=True), mask=there)


@triton.constexpr_function
def _code(shift: int, bits: int, less: int, half: bool, shared: bool, scaled: int) -> str:
    """PTX that makes numbers of 16 bits of values of two neighbouring units, $1 and $2.

    Whole numbers below 2^7 are the lowest bits of the mantissa of 2^7 (2^10 in float16), so they
    need a mask and a difference and no conversion. shared: $1 has the lower halves of both units
    and $2 the upper ones. less: what is taken off. scaled: 1 if a scale follows, 2 if an offset,
    too.
    """
    dtype, power, unit = ("f16x2", 0x6400, 0x3C00) if half else ("bf16x2", 0x4300, 0x3F80)
    lines = [".reg .b32 a, b, c"]
    if shared:
        lines += [f"shr.b32 a, ${1 + shift // 16}, {shift % 16}"]
    else:
        lines += [f"shr.b32 a, $1, {shift}", f"shr.b32 b, $2, {shift}", "prmt.b32 a, a, b, 0x5410"]
    lines += [f"lop3.b32 a, a, {((1 << bits) - 1) * 0x10001}, {power * 0x10001}, 0xEA"]
    # Before compute capability 9.0 there is no other operation on bfloat16 than this.
    lines += [f"mov.b32 b, {unit * 0x10001}", f"mov.b32 c, {(0x8000 | power + less) * 0x10001}"]
    lines += [f"fma.rn.{dtype} {'a' if scaled else '$0'}, a, b, c"]
    if scaled:
        lines += [
            "mov.b32 b, 0x80008000",
            f"fma.rn.{dtype} $0, a, $3, {'$4' if scaled > 1 else 'b'}",
        ]
    return "{ " + "; ".join(lines) + "; }"


@triton.jit
def _halves(unit):
    """The lower halves of two neighbouring units, and the upper ones."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
        "=&r,=&r,r,r",
        [unit],
        tl.int32,
        True,
        2,
    )


@triton.jit
def _values(
    unit,
    p: tl.constexpr,
    times,
    moved,
    book,
    dtype: tl.constexpr,
    BITS: tl.constexpr,
    BOOK: tl.constexpr,
    MIDDLE: tl.constexpr,
    SCALED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The p-th values of units as numbers of a dtype. SCALED: 0 before they are scaled, 1 with a
    scale, 2 with an offset, too. PAIRED: `unit` has what `_halves` makes of them, if bits do not
    lie in both."""
    if PAIRED:
        CODE: tl.constexpr = _code(
            p * BITS, BITS, MIDDLE, dtype == tl.float16, 8 % BITS == 0, SCALED
        )
        if SCALED == 2:
            found = tl.inline_asm_elementwise(
                CODE, "=r,r,r,r,r", [unit, times, moved], dtype.value, True, 2
            )
        elif SCALED == 1:
            found = tl.inline_asm_elementwise(CODE, "=r,r,r,r", [unit, times], dtype.value, True, 2)
        else:
            found = tl.inline_asm_elementwise(CODE, "=r,r,r", [unit], dtype.value, True, 2)
    else:
        level = _level(unit, p, book, BITS, BOOK).to(tl.float32) - MIDDLE
        if SCALED != 0:
            level *= times
        if SCALED == 2:
            level += moved
        found = level.to(dtype)
    return found


@triton.jit
def some_tokens(
    x,
    weight,
    scale,
    offset,
    book,
    result,
    N,
    U,
    groups,
    run,
    M,
    parts,
    EACH: tl.constexpr,
    BITS: tl.constexpr,
    UNIT: tl.constexpr,
    BOOK: tl.constexpr,
    AFFINE: tl.constexpr,
    MIDDLE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Of M tokens, TOKENS at a time on tensor cores: a tile of the weight becomes the dtype of x.

    x f16|bf16[V,M,U]: the p-th values of all units together; book f32. parts: programs that share a
    row's units; the result is f32[parts,M,N], their sums. WHOLE: a row has one scale, which its sum
    is multiplied by. PAIRED: see `_values`. The rest as for `few_tokens`.
    """
    VALUES: tl.constexpr = UNIT * 8 // BITS
    SCALED: tl.constexpr = 0 if WHOLE else 2 if AFFINE else 1
    dtype: tl.constexpr = x.dtype.element_ty
    wide: tl.constexpr = dtype if PAIRED else tl.float32
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[None, :]
    t = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    part = tl.program_id(2)
    row = n.to(tl.int64)
    books = book + (n // run) * ((1 << BITS) * BOOK)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    steps = tl.cdiv(tl.cdiv(U, COLUMNS), parts)
    for step in range(0, steps):
        k = (part * steps + step) * COLUMNS + tl.arange(0, COLUMNS)
        u = k[:, None]
        here = (n < N) & (u < U)
        unit = _units(weight, row * U + u, here, UNIT)
        times = unit
        moved = unit
        if SCALED != 0:
            place = row * groups + u // EACH
            times = tl.load(scale + place, mask=here, other=0.0).to(wide)
            if SCALED == 2:
                moved = tl.load(offset + place, mask=here, other=0.0).to(wide)
        if PAIRED and 8 % BITS == 0:
            unit = _halves(unit)
        for p in tl.static_range(VALUES):
            fed = (t < M) & (k[None, :] < U)
            values = tl.load(x + (p * M + t) * U + k[None, :], mask=fed, other=0.0)
            weights = _values(
                unit, p, times, moved, books, dtype, BITS, BOOK, MIDDLE, SCALED, PAIRED
            )
            total = tl.dot(values, weights, total)
    if WHOLE:
        total *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(result + (part * M + t) * N + n, total, mask=(n < N) & (t < M))


def run(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    codebook: Tensor | None,
    result: Tensor,
    bits: int,
    how: Units,
    way: Way,
) -> None:
    """Launch a kernel on operands that `gpu_products` checked: x i8[P,M,U,4] if rounded to bytes,
    else [V,M,U]."""
    _, tokens, outputs = result.shape
    few = x.dim() == 4
    entries = 0 if codebook is None else codebook.shape[-1]
    books = 1 if codebook is None else codebook.numel() // entries
    middle = 2 ** (bits - 1) if offset is None and codebook is None else 0
    operands = (
        x.flatten().view(torch.int32) if few else x,
        weight.flatten().view(torch.int32) if how.size == 4 else weight,
        scale,
        scale if offset is None else offset,
        scale if codebook is None else codebook,
        result,
    )
    sizes = (outputs, how.count, scale.shape[1], outputs // books, tokens)
    kind = (how.each, bits, how.size, entries >> bits, offset is not None, middle)
    tile = (way.tokens, way.rows, way.columns)
    programs = triton.cdiv(outputs, way.rows)
    options = {"num_warps": way.warps, "num_stages": way.stages}
    if few:
        together = math.gcd(how.each, way.columns)
        groups = way.columns // together
        few_tokens[(programs,)](*operands, *sizes, *kind, *tile, groups, not x.is_cuda, **options)
    else:
        grid = (programs, triton.cdiv(tokens, way.tokens), way.parts)
        whole = scale.shape[1] == 1 and offset is None
        # A mantissa of bfloat16 holds 7 bits.
        paired = x.is_cuda and codebook is None and (x.dtype == torch.float16 or bits < 8)
        how_scaled = (whole, paired)
        some_tokens[grid](*operands, *sizes, way.parts, *kind, *tile, *how_scaled, **options)
