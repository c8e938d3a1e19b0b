"""Caches whose older rows are quantized in groups (KIVI).

Values of a group are ``step * code + least``, both in half precision. A group is several rows of
one channel (keys, whose channels differ in scale) or several channels of one row. The latest rows,
which may be rolled back, are floats in a state of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..support.errors import InputError
from . import Sample, op
from .operands import Operands

HALF = torch.float16
MOST = 65504.0
"""The largest number in half precision."""
U8 = torch.uint8
BITS = (2, 3, 4, 8)


def code_pieces(bits: int) -> list[int]:
    """Bits of the pieces that codes are stored in, lowest first: 3 bits are stored as 2 and 1, so
    that bytes hold whole pieces."""
    return [piece for piece in (8, 4, 2, 1) if bits & piece]


def whole_bytes(width: int, bits: int) -> bool:
    """Whether every piece of a row's codes fills whole bytes."""
    return all(width * piece % 8 == 0 for piece in code_pieces(bits))


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Pack integers f32[...,D] into bytes f32[...,D*bits/8], piece after piece."""
    parts, below = [], 0
    for piece in code_pieces(bits):
        numbers = torch.floor(codes * 2.0**-below) if below else codes
        if below + piece < bits:
            numbers = numbers - torch.floor(codes * 2.0 ** -(below + piece)) * float(2**piece)
        size = codes.shape[-1] * piece // 8
        packed = numbers[..., :size]
        for place in range(1, 8 // piece):
            own = numbers[..., place * size : (place + 1) * size]
            packed = packed + own * float(2 ** (piece * place))
        parts.append(packed)
        below += piece
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _unpacked(packed: Tensor, width: int, bits: int) -> Tensor:
    """The integers f32[...,width] of packed bytes; the reverse of `_packed`."""
    codes, below, start = None, 0, 0
    for piece in code_pieces(bits):
        own = packed[..., start : start + width * piece // 8]
        numbers = []
        for place in range(8 // piece):
            above = torch.floor(own * 2.0 ** (-piece * (place + 1)))
            low = torch.floor(own * 2.0 ** (-piece * place)) if place else own
            numbers.append(low - above * float(2**piece))
        part = torch.cat(numbers, dim=-1) * float(2**below)
        codes = part if codes is None else codes + part
        below, start = below + piece, start + width * piece // 8
    assert codes is not None
    return codes


def stored_rows(past: int, residual: int, block: int) -> int:
    """Number of quantized rows before a step: all but the latest `residual` and those since the
    last multiple of `block`."""
    return past - min(past, residual + past % block)


def check_groups(
    op: str, width: int, rows: int | None, bits: int, group: int, by: bool, outliers: int
) -> int:
    """The group size along a row or a channel. Errors: `InputError`."""
    if bits not in BITS or group < 1 or not whole_bytes(width, bits):
        raise InputError(
            f"{op}: expected bits of {BITS}, whole bytes a row and group >= 1, got bits={bits}, "
            f"rows of {width}, group={group}"
        )
    each = group if by else min(group, width)
    size = rows if by else width
    if size is not None and size % each:
        what = "rows" if by else "channels"
        raise InputError(f"{op}: {size} {what} are no multiple of group={group}")
    if not 0 <= outliers < each:
        raise InputError(f"{op}: outliers={outliers} of groups of {each}; expected fewer")
    return each


def check_channels(op: str, name: str, groups: object, rows: object, group: int) -> None:
    """Errors: `InputError` for groups of channels that end before the rows do. Sizes that are
    symbols are checked when they are numbers."""
    if isinstance(groups, int) and isinstance(rows, int) and groups * group < rows:
        raise InputError(
            f"{op}: {name} are of {groups} groups of {group}, and there are {rows} rows"
        )


def _quantize_samples() -> Iterator[Sample]:
    for bits, by_channel in ((2, True), (4, False), (8, True), (3, False)):
        x = torch.randn(2, 2, 6, 8)
        group = 3 if by_channel else 4
        yield (x,), {"bits": bits, "group": group, "by_channel": by_channel}
        yield (x,), {"bits": bits, "group": group, "by_channel": by_channel, "outliers": 2}


def _check_quantize(
    given: Operands, bits: int, group: int, by_channel: bool, outliers: int
) -> None:
    rows, width = given.sizes["T"], given.sizes["D"]
    each = check_groups(given.op, width, rows, bits, group, by_channel, outliers)
    given.sizes.update(
        K=width * bits // 8,
        S=rows // each if by_channel else rows,
        N=(2 + 2 * outliers) * (width if by_channel else width // each),
    )


@op("x: BGTD -> u8 BGTK, f16 BGSN", samples=_quantize_samples, also=_check_quantize)
def quantize_groups(
    x: Tensor, *, bits: int, group: int, by_channel: bool, outliers: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantize rows in groups of `group` values with a common step and minimum.

    ``%r: (u8[B,G,64,16], f16[B,G,2,128]) = graftwork.quantize_groups(%k, bits=2, group=32,
    by_channel=True)``

    x [B,G,T,D] -> codes u8[B,G,T,D*bits/8] of 2, 3, 4 or 8 bits, and steps. by_channel: groups of
    consecutive rows, steps f16[B,G,T/group,N*D]; else groups of consecutive channels (all, if fewer
    than `group`), steps f16[B,G,T,N*D/group]. N is 2 + 2 * outliers: step, minimum, then index and
    value of each of the `outliers` values that are farthest from the group's mean. They are rounded
    to half precision, within its range, before codes are chosen. Outliers do not widen the step. A
    row's first D*bits/8 codes are the lowest bits of its bytes, the next ones the bits above; of 3
    bits, the two lower ones of all codes come first.
    Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (2024);
    outliers: Hooper et al., "KVQuant" (2024), and Kang et al., "GEAR" (2024).
    """
    batch, groups, rows, width = x.shape
    each = group if by_channel else min(group, width)
    shape = (rows // each, each, width) if by_channel else (rows, width // each, each)
    axis = 3 if by_channel else 4
    numbers = x.float().reshape(batch, groups, *shape)
    small = large = numbers
    apart: list[Tensor] = []
    if outliers:
        place = _places(each, axis, x.device)
        far = (numbers - numbers.mean(axis, keepdim=True)).abs()
        for _ in range(outliers):
            which = far.argmax(axis, keepdim=True)
            found = place == which
            apart += [which.float(), numbers.masked_fill(~found, 0.0).sum(axis, keepdim=True)]
            far = far.masked_fill(found, -1.0)
            small, large = small.masked_fill(found, 3e38), large.masked_fill(found, -3e38)
    least = _half(small.amin(axis, keepdim=True))
    step = _half((large.amax(axis, keepdim=True) - least) / float(2**bits - 1))
    codes = torch.round((numbers - least) / torch.where(step > 0, step, torch.ones_like(step)))
    codes = torch.clamp(codes, 0.0, float(2**bits - 1)).reshape(x.shape)
    kept = [part.squeeze(axis) for part in (step, least, *apart)]
    return _packed(codes, bits).to(U8), torch.cat(kept, dim=-1).clamp(-MOST, MOST).to(HALF)


def _half(x: Tensor) -> Tensor:
    """Numbers f32 that half precision has, the nearest to x."""
    return x.clamp(-MOST, MOST).to(HALF).float()


def _places(count: int, axis: int, device: torch.device) -> Tensor:
    """0, 1, ... along an axis of groups, i64."""
    place = torch.arange(count, device=device)
    return place[:, None] if axis == 3 else place


def _values_samples() -> Iterator[Sample]:
    for bits, by_channel, outliers in ((2, True, 0), (4, False, 1), (8, True, 2), (3, False, 0)):
        how = {"bits": bits, "group": 4, "by_channel": by_channel, "outliers": outliers}
        yield quantize_groups(torch.randn(3, 2, 12, 8), **how), how


def _check_values(
    given: Operands, steps: Tensor, bits: int, group: int, by_channel: bool, outliers: int
) -> None:
    if not by_channel and given.sizes["S"] != given.sizes["C"]:
        given.refuse("steps", steps, "BGCN", HALF)
    if by_channel:
        check_channels(given.op, "steps", given.sizes["S"], given.sizes["C"], group)
    width = given.sizes["D"] = given.sizes["K"] * 8 // max(bits, 1)
    each = check_groups(given.op, width, None, bits, group, by_channel, outliers)
    numbers = (2 + 2 * outliers) * (width if by_channel else width // each)
    if steps.shape[3] != numbers:
        raise InputError(
            f"{given.op}: rows of {width} in {bits} bits have steps [B,G,S,{numbers}], got "
            f"{list(steps.shape)}"
        )


@op("codes: u8 BGCK, steps: f16 BGSN -> f32 BGCD", samples=_values_samples, also=_check_values)
def group_values(
    codes: Tensor, steps: Tensor, *, bits: int, group: int, by_channel: bool, outliers: int = 0
) -> Tensor:
    """Dequantize the codes of `quantize_groups`.

    ``%k: f32[B,G,C,D] = graftwork.group_values(%kc, %ks, bits=2, group=32, by_channel=True)``

    codes u8[B,G,C,D*bits/8] and steps, see there.
    """
    rows, width = codes.shape[2], codes.shape[3] * 8 // bits
    numbers = _unpacked(codes.float(), width, bits)
    index = torch.arange(rows, device=codes.device)
    steps = steps.float()
    if by_channel:
        known = steps.index_select(2, torch.div(index, group, rounding_mode="floor"))
        parts: list[Tensor] = list(known.split(width, dim=3))
        place = (index % group)[:, None]
    else:
        shared = min(group, width)
        numbers = numbers.reshape(*numbers.shape[:3], width // shared, shared)
        parts = list(steps[..., None].split(width // shared, dim=3))
        place = torch.arange(shared, device=codes.device)
    values = numbers * parts[0] + parts[1]
    for which, size in zip(parts[2::2], parts[3::2], strict=True):
        values = torch.where(place == which, size, values)
    return values.reshape(*codes.shape[:3], width)


def _join_samples() -> Iterator[Sample]:
    past = torch.tensor([9, 2, 6])
    given = (torch.randn(3, 2, 12, 8), torch.randn(3, 2, 7, 8), past)
    yield given, {"residual": 4, "block": 2}


@op(
    "stored: BGCD, recent: BGRD, past: i64 B, residual >= 1, block >= 1 -> recent stored",
    samples=_join_samples,
)
def join_rows(stored: Tensor, recent: Tensor, past: Tensor, *, residual: int, block: int) -> Tensor:
    """All rows of a text in order: the dequantized ones, then the latest.

    ``%k: f32[B,G,C,D] = graftwork.join_rows(%kv, %kr, %past, residual=128, block=64)``

    stored [B,G,C,D], dequantized; recent [B,G,R,D]; past i64[B] rows before the step, all but
    residual + past mod block of them stored. The step's rows follow in `recent`. Later rows are
    invalid.
    """
    rows, count, width = stored.shape[2], recent.shape[2], recent.shape[3]
    index = torch.arange(rows, device=past.device)
    own = index[None] - (past - torch.minimum(past, residual + past % block))[:, None]
    place = own.clamp(0, count - 1)[:, None, :, None]
    latest = recent.gather(2, place.expand(*stored.shape[:3], width))
    return torch.where((own >= 0)[:, None, :, None], latest, stored.to(recent.dtype))


def _store_samples() -> Iterator[Sample]:
    past = torch.tensor([9, 2, 6])
    yield (torch.randn(3, 2, 12, 4), torch.randn(3, 2, 2, 4), past), {"after": 4}
    codes = torch.randint(256, (3, 2, 2, 4), dtype=U8)
    cache = torch.zeros(3, 2, 6, 4, dtype=U8)
    yield (cache, codes, torch.tensor([8, 0, 4])), {"after": 4, "each": 2}


@op(
    "cache: float|u8 BGCD, new: float|u8 BGTD, past: i64 B, after >= 1, each >= 1 -> cache",
    samples=_store_samples,
)
def store_rows(cache: Tensor, new: Tensor, past: Tensor, *, after: int, each: int = 1) -> Tensor:
    """Write rows to a cache from the text's row past - after on.

    ``%c: u8[B,G,C,16] = graftwork.store_rows(%kv.0.key.codes, %r.0, %past, after=192)``

    cache [B,G,C,D]; new [B,G,T,D], both floating or both u8; past i64[B]: a sequence with fewer
    than `after` rows is unchanged. each: text rows per cache row. Writes stay inside the cache.
    """
    count = new.shape[2]
    first = torch.div((past - after).clamp(min=0), each, rounding_mode="floor")
    first = first.clamp(max=cache.shape[2] - count)
    rows = first[:, None] + torch.arange(count, device=past.device)
    index = rows[:, None, :, None].expand(new.shape)
    kept = torch.where(
        (past >= after)[:, None, None, None], new.to(cache.dtype), cache.gather(2, index)
    )
    return cache.scatter(2, index, kept)
