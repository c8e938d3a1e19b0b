"""Ops of lowered programs: what ONNX Runtime has as one kernel and graftwork says in several ops.

Their meanings are written in graftwork's own ops, so a lowered program still runs in the reference
interpreter and can be compared with what it was lowered from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ir.ops import Sample, op
from ...ir.ops.attention import alibi, attend, cache_write, step_mask
from ...ir.ops.norm import layer_norm
from ...ir.ops.quantized_cache import attend_quantized, quantize_rows
from ...ir.ops.rotary import rotary
from ...ir.ops.select import cache_read


def _samples() -> Iterator[Sample]:
    batch, width, heads, groups, dim, rows = 1, 3, 4, 2, 16, 12
    query = torch.randn(batch, width, heads * dim)
    key, value = (torch.randn(batch, width, groups * dim) for _ in range(2))
    caches = [torch.randn(batch, groups, rows, dim) for _ in range(2)]
    angle = torch.randn(32, dim // 2)
    positions = torch.tensor([[4, 5, 6]])
    counts = (torch.tensor([6], dtype=torch.int32), torch.tensor(7, dtype=torch.int32))
    tables = (angle.cos(), angle.sin())
    options = {"heads": heads, "groups": groups, "scale": 0.25}
    yield (query, key, value, *caches, *counts, positions, *tables), options
    packed = torch.cat([query, key, value], -1)
    yield (packed, None, None, *caches, *counts, None, *tables), options | {"window": 3}
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    forked = torch.tensor([[4, 5, 5]])
    yield (packed, None, None, *caches, *counts, forked, *tables, tree), options
    yield (query, key, value, *caches, *counts), options | {"softcap": 2.0}
    extras = {"sinks": torch.randn(heads), "slopes": torch.rand(heads)}
    yield (query, key, value, *caches, *counts, positions), options | extras


@op(
    "query: BTQ, past_key: BGCD, past_value: BGCE, N = heads * E -> BTN, past_key, past_value",
    samples=_samples,
)
def ort_gqa(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    seqlens: Tensor,
    total: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """com.microsoft.GroupQueryAttention: rotary embedding, two cache writes and attention in one.

    ``%a: (f32[B,T,D*H], f32[B,G,C,D], f32[B,G,C,D]) = graftwork.ort_gqa(%qkv, None, None,
    %kv.0.key, %kv.0.value, %seqlens, %total, %positions, @cos, @sin, heads=8, groups=2,
    scale=0.125)``

    query [B,T,H*D], key and value [B,T,G*D]; or key = value = None and query their concatenation
    [B,T,(H+2G)*D]. Caches past_key, past_value [B,G,C,D]; seqlens i32[B] = past + T - 1; total
    i32[]: at least every past + T, and the width of the bias that ancestors and slopes turn into.
    positions None: past, past + 1, ...; cos, sin tables [context,R/2], or None for no rotary
    embedding; past, ancestors, sinks, slopes, window, softcap as in `step_mask`, `attend` and
    `alibi`. Returns the attended values and both caches.
    """
    past = seqlens.long() + 1 - query.shape[1]
    more = past, positions, cos, sin, ancestors, sinks, slopes
    options = {"window": window, "softcap": softcap, "interleaved": interleaved}
    sizes = {"heads": heads, "groups": groups, "scale": scale}
    whole: tuple[Tensor, Tensor, Tensor] = ort_attend(
        query, key, value, past_key, past_value, *more, **sizes, **options
    )
    return whole


def _attend_samples() -> Iterator[Sample]:
    batch, width, heads, groups, dim, wide, rows = 2, 3, 4, 2, 12, 10, 12
    query, key = torch.randn(batch, width, heads * dim), torch.randn(batch, width, groups * dim)
    value = torch.randn(batch, width, groups * wide)
    caches = [torch.randn(batch, groups, rows, size) for size in (dim, wide)]
    past, positions = torch.tensor([4, 0]), torch.tensor([[4, 5, 5], [0, 1, 1]])
    angle = torch.randn(32, 4)
    tables = (angle.cos(), angle.sin())
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool).expand(2, 3, 3)
    options = {"heads": heads, "groups": groups, "scale": 0.25}
    yield (query, key, value, *caches, past), options
    packed = torch.cat([query, key, value], -1)
    yield (packed, None, None, *caches, past, None, *tables), options | {"window": 3}
    yield (packed, None, None, *caches, past, positions, None, None, tree), options | {"chunk": 5}
    whole = (packed, None, None, *caches, past, positions, *tables, tree)
    yield whole, options | {"window": 3, "softcap": 2.0, "interleaved": True}
    yield (*whole, torch.randn(heads), torch.rand(heads)), options
    one = [cache[:, :1] for cache in caches]
    own = {"heads": 2, "groups": 1, "scale": 0.25, "first": 1, "keys": 2}
    yield (packed, None, None, *one, past, positions, *tables), own | {"window": 3, "latest": True}
    wider = [cache.repeat(1, 2, 1, 1) for cache in caches]
    yield (query, key, value, *wider, past), options | {"groups": 4, "repeat": 2}


@op(
    "query: BTQ, past_key: BGCD, past_value: BGCE, N = heads * E -> BTN, past_key, past_value",
    samples=_attend_samples,
)
def ort_attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    past: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
    chunk: int | None = None,
    repeat: int = 1,
    first: int = 0,
    keys: int | None = None,
    latest: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """graftwork's own CachedAttention: rotary embedding, two cache writes and attention in one.

    ``%a: (f32[B,T,E*H], f32[B,G,C,D], f32[B,G,C,E]) = graftwork.ort_attend(%qkv, None, None,
    %kv.0.key, %kv.0.value, %past, %positions, @cos, @sin, heads=8, groups=2, scale=0.125)``

    query [B,T,H*D], key [B,T,G*D], value [B,T,G*E]; or key = value = None and query their
    concatenation. Caches past_key [B,G,C,D], past_value [B,G,C,E]; past i64[B]. positions i64[B,T],
    None: past, past + 1, ...; cos, sin tables [context,R/2], or None for no rotary embedding;
    ancestors, sinks, slopes, window, chunk, softcap as in `step_mask`, `attend` and `alibi`.
    repeat: of these caches' heads hold each key and value. first, keys: where the operands have
    `keys` heads of keys, and as many of queries and values as belong to them, these are for the
    heads from `first` on. latest: caches hold the latest rows of a text, and the step's first token
    stands behind them as far as `window` is concerned. Returns the attended values and both caches.
    """
    given = query, key, value, past, positions, cos, sin
    sizes = heads, groups, past_key.shape[3], past_value.shape[3]
    q, k, v, positions = _turned(*given, sizes, interleaved, (repeat, first, keys))
    placed = _placed(positions, past) if latest else positions
    written, values = cache_write(past_key, k, past), cache_write(past_value, v, past)
    reach = {"window": window, "chunk": chunk}
    mask = step_mask(past, placed, ancestors, past_key.shape[2], **reach)
    bias = None if slopes is None else alibi(slopes, past, positions, past_key.shape[2])
    out = attend(q, written, values, mask, bias, sinks, scale=scale, softcap=softcap)
    return out.transpose(1, 2).flatten(2), written, values


def _keeping_samples() -> Iterator[Sample]:
    for args, options in _attend_samples():
        given = list(args) + [None] * (12 - len(args))
        kept = torch.randn(2, options["heads"], 9, 12)
        yield (*given[:6], kept, torch.tensor([6, 0]), *given[6:]), options


@op(
    "query: BTQ, past_key: BGCD, past_value: BGCE, kept: BHWD, kept_past: i64 B, H = heads, "
    "N = heads * E -> BTN, past_key, past_value, kept",
    samples=_keeping_samples,
)
def ort_attend_keeping(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    past: Tensor,
    kept: Tensor,
    kept_past: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
    chunk: int | None = None,
    repeat: int = 1,
    first: int = 0,
    keys: int | None = None,
    latest: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ort_attend` that puts its queries, as they are compared with keys, into a state, too.

    ``%a: (f32[B,T,E*H], f32[B,G,C,D], f32[B,G,C,E], f32[B,H,W,D]) = graftwork.ort_attend_keeping(
    %qkv, None, None, %kv.0.key, %kv.0.value, %past, %kv.0.query, %in_block, %positions, @cos, @sin,
    heads=8, groups=2, scale=0.125)``

    kept [B,H,W,D], kept_past i64[B]: written as by `cache_write`. query, key, value, past_key,
    past_value, past, positions, cos, sin, ancestors, sinks and slopes as in `ort_attend`. Returns
    the attended values, both caches and the state.
    """
    given = query, key, value, past, positions, cos, sin
    sizes = heads, groups, past_key.shape[3], past_value.shape[3]
    q = _turned(*given, sizes, interleaved, (repeat, first, keys))[0]
    how: dict[str, Any] = {"heads": heads, "groups": groups, "scale": scale, "window": window}
    how |= {"softcap": softcap, "interleaved": interleaved, "chunk": chunk, "latest": latest}
    how |= {"repeat": repeat, "first": first, "keys": keys}
    before = query, key, value, past_key, past_value, past, positions, cos, sin
    done: tuple[Tensor, ...] = ort_attend(*before, ancestors, sinks, slopes, **how)
    return done[0], done[1], done[2], cache_write(kept, q, kept_past)


def _put_samples() -> Iterator[Sample]:
    names = ("heads", "groups", "interleaved", "repeat", "first", "keys")
    for args, options in _attend_samples():
        yield args[:9], {name: options[name] for name in names if name in options}


@op(
    "query: BTQ, past_key: BGCD, past_value: BGCE, past: i64 B, H = heads, N = groups // repeat "
    "-> BHTD, past_key, past_value, BNTD",
    samples=_put_samples,
)
def ort_put_rows(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    past: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    interleaved: bool = False,
    repeat: int = 1,
    first: int = 0,
    keys: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `ort_attend` does before tokens attend: graftwork's own PutRows, for other attentions.

    ``%a: (f32[B,H,T,D], f32[B,G,C,D], f32[B,G,C,E], f32[B,G,T,D]) = graftwork.ort_put_rows(%qkv,
    None, None, %kv.0.key, %kv.0.value, %past, %positions, @cos, @sin, heads=8, groups=2)``

    query [B,T,H*D], key [B,T,G*D], value [B,T,G*E], past_key [B,G,C,D], past_value [B,G,C,E], past
    i64[B], positions i64[B,T], cos, sin and all options as in `ort_attend`. Returns the queries
    [B,H,T,D], turned by their positions, both caches with the new rows behind `past`, and the new
    keys, turned likewise.
    """
    sizes = heads, groups, past_key.shape[3], past_value.shape[3]
    given, of = (query, key, value, past, positions, cos, sin), (repeat, first, keys)
    q, k, v, _ = _turned(*given, sizes, interleaved, of)
    caches = cache_write(past_key, k, past), cache_write(past_value, v, past)
    return q.contiguous(), *caches, k[:, ::repeat].contiguous()


def _placed(positions: Tensor, past: Tensor) -> Tensor:
    """Positions of a step whose first token has as many rows before it."""
    return positions - (positions[:, :1] - past[:, None])


def _turned(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    sizes: tuple[int, int, int, int],
    interleaved: bool,
    of: tuple[int, int, int | None] = (1, 0, None),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value by heads, turned by positions, and these. sizes: heads, groups, D, E.
    of: repeat, first and keys of `ort_attend`."""
    batch, width = query.shape[:2]
    heads, groups, dim, wide = sizes
    repeat, first, keys = of
    own = groups // repeat
    keys, each = keys or own, heads // own
    if positions is None:
        positions = past[:, None] + torch.arange(width, device=query.device)
    if key is None or value is None:
        query, key, value = query.split([keys * each * dim, keys * dim, keys * wide], dim=-1)
    q = query.reshape(batch, width, keys * each, dim).transpose(1, 2)
    q = q[:, first * each : first * each + heads]
    k = key.reshape(batch, width, keys, dim).transpose(1, 2)[:, first : first + own]
    v = value.reshape(batch, width, keys, wide).transpose(1, 2)[:, first : first + own]
    k, v = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (k, v))
    if cos is not None and sin is not None:
        q = rotary(q, cos[positions], sin[positions], interleaved=interleaved)
        k = rotary(k, cos[positions], sin[positions], interleaved=interleaved)
    return q, k, v, positions


def _quantized_samples() -> Iterator[Sample]:
    for bits, turned in ((8, False), (4, True)):
        for args, options in _attend_samples():
            if options["groups"] != 2:
                continue
            caches = [torch.randn(2, 2, 12, 16) for _ in "kv"]
            stored = [quantize_rows(cache, bits=bits, turned=turned) for cache in caches]
            codes, steps = zip(*stored, strict=True)
            pieces = [torch.randn(2, 3, heads * 16) for heads in (4, 2, 2)]
            how = {"bits": bits, "turned": turned, **options}
            yield (*pieces, *codes, *steps, *args[5:]), how


@op(
    "query: BTQ, past_key: u8 BGCK, past_value: u8 BGCV, past_key_steps: f32 BGCS, "
    "past_value_steps: f32 BGCS, N = heads * V * 8 // bits -> BTN, past_key, past_value, "
    "past_key_steps, past_value_steps",
    samples=_quantized_samples,
)
def ort_attend_quantized(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    past_key: Tensor,
    past_value: Tensor,
    past_key_steps: Tensor,
    past_value_steps: Tensor,
    past: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    ancestors: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    heads: int,
    groups: int,
    bits: int,
    turned: bool,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
    chunk: int | None = None,
    repeat: int = 1,
    first: int = 0,
    keys: int | None = None,
    latest: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`ort_attend` with caches as `quantize_rows` stores them.

    ``%a: (f32[B,T,512], u8[B,G,C,32], u8[B,G,C,32]) = graftwork.ort_attend_quantized(%qkv, None,
    None, %kc, %vc, %ks, %vs, %past, %positions, @cos, @sin, heads=8, groups=2, bits=4,
    turned=True, scale=0.125)``

    query, key, value, past, positions, cos, sin, ancestors, sinks, slopes and all options as
    there; past_key u8[B,G,C,D*bits/8], past_value u8[B,G,C,E*bits/8], and their steps
    past_key_steps, past_value_steps f32[B,G,C,2]. Returns the attended values and the caches, in
    this order.
    """
    dim, wide = (cache.shape[3] * 8 // bits for cache in (past_key, past_value))
    given = query, key, value, past, positions, cos, sin
    sizes, of = (heads, groups, dim, wide), (repeat, first, keys)
    q, k, v, positions = _turned(*given, sizes, interleaved, of)
    placed = _placed(positions, past) if latest else positions
    new = [quantize_rows(rows, bits=bits, turned=turned) for rows in (k, v)]
    old = (past_key, past_key_steps), (past_value, past_value_steps)
    written, values = (
        [cache_write(cache, part, past) for cache, part in zip(caches, rows, strict=True)]
        for caches, rows in zip(old, new, strict=True)
    )
    reach = {"window": window, "chunk": chunk}
    mask = step_mask(past, placed, ancestors, past_key.shape[2], **reach)
    bias = None if slopes is None else alibi(slopes, past, positions, past_key.shape[2])
    how = {"bits": bits, "turned": turned, "scale": scale, "softcap": softcap}
    out = attend_quantized(q, *written, *values, mask, bias, sinks, **how)
    return out.transpose(1, 2).flatten(2), written[0], values[0], written[1], values[1]


def _layer_samples() -> Iterator[Sample]:
    x, residual = (torch.randn(2, 3, 8) for _ in range(2))
    yield (x, residual, torch.rand(8), torch.randn(8)), {"eps": 1e-5}
    yield (x, residual, torch.rand(8), None), {"eps": 1e-5}


@op("x: ...H, residual: x, weight: H, bias: H -> x, x", samples=_layer_samples)
def ort_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual): com.microsoft.SkipLayerNormalization.

    ``%r: (f32[B,T,H], f32[B,T,H]) = graftwork.ort_add_layer_norm(%x, %res, @w, @b, eps=1e-05)``

    x, residual [B,T,H]; weight, bias [H].
    """
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps), total


def _rows_samples() -> Iterator[Sample]:
    yield (torch.randn(2, 1, 9, 3), torch.tensor([0, 5]), torch.zeros(2, 4, dtype=torch.int64)), {}


@op("cache: B1CH, past: i64 B, like: any BT -> BTH", samples=_rows_samples)
def ort_read_rows(cache: Tensor, past: Tensor, like: Tensor) -> Tensor:
    """The rows of a cache that a step's tokens have: graftwork's own ReadRows.

    ``%x: f32[B,T,H] = graftwork.ort_read_rows(%stream, %past, %positions)``

    cache f32[B,1,C,H]; past i64[B]; like i64[B,T], of which the size alone counts. Returns rows
    past, past + 1, ... of each sequence.
    """
    columns = torch.arange(like.shape[1], device=cache.device).expand(like.shape)
    rows: Tensor = cache_read(cache, past, columns)
    return rows
