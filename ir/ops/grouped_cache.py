"""Caches whose older rows are whole numbers of few bits, with steps that several numbers share.

Numbers of a group are ``step * code + least``. A group is some rows of one channel, because the
channels of keys differ in size and keep it from row to row, or some channels of one row. Groups of
rows can only be made of rows that stay: the latest are floats in a state of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InputError
from . import Sample, define
from .operands import Operands

I64, U8 = torch.int64, torch.uint8
BITS = (2, 4, 8)


def stored_rows(past: int, residual: int, block: int) -> int:
    """How many of a text's rows are in few bits before a step: all but the latest `residual` and
    those since the last multiple of `block`."""
    return past - min(past, residual + past % block)


def _check_groups(op: str, width: int, rows: int | None, bits: int, group: int, by: bool) -> int:
    """Numbers of a row or of a channel that share a step. Errors: `InputError`."""
    if bits not in BITS or group < 1 or width % (8 // bits):
        raise InputError(
            f"{op}: expected bits of {BITS}, whole bytes a row and group >= 1, got bits={bits}, "
            f"rows of {width}, group={group}"
        )
    each = group if by else min(group, width)
    size = rows if by else width
    if size is not None and size % each:
        what = "rows" if by else "channels"
        raise InputError(f"{op}: {size} {what} are no multiple of group={group}")
    return each


def _quantize_samples() -> Iterator[Sample]:
    for bits, by_channel in ((2, True), (4, False), (8, True)):
        x = torch.randn(2, 2, 6, 8)
        group = 3 if by_channel else 4
        yield (x,), {"bits": bits, "group": group, "by_channel": by_channel}


def _quantize_fake(x: Tensor, *, bits: int, group: int, by_channel: bool) -> tuple[Tensor, Tensor]:
    Operands("quantize_groups").fit("x", x, "BGTD")
    batch, groups, rows, width = x.shape
    each = _check_groups("quantize_groups", width, rows, bits, group, by_channel)
    codes = x.new_empty((batch, groups, rows, width * bits // 8), dtype=U8)
    sizes = (rows // each, 2 * width) if by_channel else (rows, 2 * (width // each))
    return codes, x.new_empty((batch, groups, *sizes), dtype=torch.float32)


@define(
    "quantize_groups(Tensor x, *, int bits, int group, bool by_channel) -> (Tensor, Tensor)",
    samples=_quantize_samples,
    fake=_quantize_fake,
)
def quantize_groups(x: Tensor, *, bits: int, group: int, by_channel: bool) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers of 2, 4 or 8 bits, of which `group` share a step and a least number.

    ``%r: (u8[B,G,64,16], f32[B,G,2,128]) = graftwork.quantize_groups(%k, bits=2, group=32,
    by_channel=True)``

    x [B,G,T,D] -> codes u8[B,G,T,D*bits/8] and steps: of `by_channel` f32[B,G,T/group,2*D], rows
    that follow each other sharing one in each channel; else f32[B,G,T,2*D/group], channels that
    follow each other in each row (all of them, if there are fewer than `group`). First what codes
    are times, then what is added. A row's first D*bits/8 codes are the lowest bits of its bytes,
    the next ones the bits above.
    Errors: `InputError` for other bits, and rows or channels that are no whole groups.
    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024).
    """
    batch, groups, rows, width = x.shape
    each = _check_groups("quantize_groups", width, rows, bits, group, by_channel)
    shape = (rows // each, each, width) if by_channel else (rows, width // each, each)
    axis = 3 if by_channel else 4
    numbers = x.float().reshape(batch, groups, *shape)
    least, most = numbers.amin(axis, keepdim=True), numbers.amax(axis, keepdim=True)
    step = (most - least) / float(2**bits - 1)
    codes = torch.round((numbers - least) / torch.where(step > 0, step, torch.ones_like(step)))
    codes = torch.clamp(codes, 0.0, float(2**bits - 1)).reshape(x.shape)
    piece = width * bits // 8
    packed = codes[..., :piece]
    for place in range(1, 8 // bits):
        packed = packed + codes[..., place * piece : (place + 1) * piece] * float(
            2 ** (bits * place)
        )
    return packed.to(U8), torch.cat([step.squeeze(axis), least.squeeze(axis)], dim=-1)


def _rows_samples() -> Iterator[Sample]:
    past = torch.tensor([9, 2, 6])
    for bits, by_channel in ((2, True), (4, False), (8, True)):
        how = {"bits": bits, "group": 2, "by_channel": by_channel}
        codes, steps = quantize_groups(torch.randn(3, 2, 12, 8), **how)
        yield (codes, steps, torch.randn(3, 2, 7, 8), past), {**how, "residual": 4, "block": 2}


def _rows_fake(
    codes: Tensor,
    steps: Tensor,
    recent: Tensor,
    past: Tensor,
    *,
    bits: int,
    group: int,
    by_channel: bool,
    residual: int,
    block: int,
) -> Tensor:
    given = Operands("grouped_rows")
    given.fit("codes", codes, "BGCK", U8)
    given.fit("steps", steps, "BGSN", torch.float32)
    given.fit("recent", recent, "BGRD")
    given.fit("past", past, "B", I64)
    width = recent.shape[3]
    each = _check_groups("grouped_rows", width, None, bits, group, by_channel)
    numbers = 2 * width if by_channel else 2 * (width // each)
    if codes.shape[3] * 8 != width * bits or steps.shape[3] != numbers:
        raise InputError(
            f"grouped_rows: rows of {width} in {bits} bits have codes [B,G,C,{width * bits // 8}] "
            f"and steps [B,G,S,{numbers}], got {list(codes.shape)} and {list(steps.shape)}"
        )
    if residual < 1 or block < 1:
        raise InputError(f"grouped_rows: residual={residual}, block={block}; expected at least 1")
    return recent.new_empty((*codes.shape[:3], width))


@define(
    "grouped_rows(Tensor codes, Tensor steps, Tensor recent, Tensor past, *, int bits, int group, "
    "bool by_channel, int residual, int block) -> Tensor",
    samples=_rows_samples,
    fake=_rows_fake,
)
def grouped_rows(
    codes: Tensor,
    steps: Tensor,
    recent: Tensor,
    past: Tensor,
    *,
    bits: int,
    group: int,
    by_channel: bool,
    residual: int,
    block: int,
) -> Tensor:
    """All rows of a text as floats, in their order: what is in few bits, and the latest.

    ``%k: f32[B,G,C,D] = graftwork.grouped_rows(%kc, %ks, %kr, %past, bits=2, group=32,
    by_channel=True, residual=128, block=64)``

    codes u8[B,G,C,D*bits/8] and steps as `quantize_groups` gives them; recent [B,G,R,D]; past
    i64[B] rows before the step, of which all but residual + past mod block are in codes. Rows of
    the step are in `recent` after those. Rows behind the step's are not valid.
    """
    _rows_fake(
        codes, steps, recent, past,
        bits=bits, group=group, by_channel=by_channel, residual=residual, block=block,
    )  # fmt: skip
    rows, width, count = codes.shape[2], recent.shape[3], recent.shape[2]
    packed = codes.float()
    pieces = []
    for piece in range(8 // bits):
        above = torch.floor(packed * 2.0 ** (-bits * (piece + 1)))
        low = torch.floor(packed * 2.0 ** (-bits * piece)) if piece else packed
        pieces.append(low - above * float(2**bits))
    numbers = torch.cat(pieces, dim=-1)
    index = torch.arange(rows, device=past.device)
    if by_channel:
        each = steps.index_select(2, torch.div(index, group, rounding_mode="floor"))
        values = numbers * each[..., :width] + each[..., width:]
    else:
        shared = min(group, width)
        parts = numbers.reshape(*numbers.shape[:3], width // shared, shared)
        scale, least = steps[..., None].split(width // shared, dim=3)
        values = (parts * scale + least).flatten(-2)
    own = index[None] - (past - torch.minimum(past, residual + past % block))[:, None]
    place = own.clamp(0, count - 1)[:, None, :, None]
    latest = recent.gather(2, place.expand(*codes.shape[:3], width))
    return torch.where((own >= 0)[:, None, :, None], latest, values.to(recent.dtype))


def _store_samples() -> Iterator[Sample]:
    past = torch.tensor([9, 2, 6])
    yield (torch.randn(3, 2, 12, 4), torch.randn(3, 2, 2, 4), past), {"after": 4}
    codes = torch.randint(256, (3, 2, 2, 4), dtype=U8)
    cache = torch.zeros(3, 2, 6, 4, dtype=U8)
    yield (cache, codes, torch.tensor([8, 0, 4])), {"after": 4, "each": 2}


def _store_fake(cache: Tensor, new: Tensor, past: Tensor, *, after: int, each: int = 1) -> Tensor:
    given = Operands("store_rows")
    stored = None if cache.dtype.is_floating_point else U8
    given.fit("cache", cache, "BGCD", stored)
    given.fit("new", new, "BGTD", stored)
    given.fit("past", past, "B", I64)
    if after < 1 or each < 1:
        raise InputError(f"store_rows: after={after}, each={each}; expected at least 1")
    return torch.empty_like(cache)


@define(
    "store_rows(Tensor cache, Tensor new, Tensor past, *, int after, int each=1) -> Tensor",
    samples=_store_samples,
    fake=_store_fake,
)
def store_rows(cache: Tensor, new: Tensor, past: Tensor, *, after: int, each: int = 1) -> Tensor:
    """The cache with rows that a text's own row past - after begins.

    ``%c: u8[B,G,C,16] = graftwork.store_rows(%kv.0.key.codes, %r.0, %past, after=192)``

    cache [B,G,C,D]; new [B,G,T,D], both floating or both u8; past i64[B]: a sequence with fewer
    than `after` rows stays as it is. each: rows of a text that one of these stands for. Nothing is
    written beyond the cache.
    """
    _store_fake(cache, new, past, after=after, each=each)
    count = new.shape[2]
    first = torch.div((past - after).clamp(min=0), each, rounding_mode="floor")
    first = first.clamp(max=cache.shape[2] - count)
    rows = first[:, None] + torch.arange(count, device=past.device)
    index = rows[:, None, :, None].expand(new.shape)
    kept = torch.where(
        (past >= after)[:, None, None, None], new.to(cache.dtype), cache.gather(2, index)
    )
    return cache.scatter(2, index, kept)
