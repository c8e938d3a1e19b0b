"""Rows of attention, caches, rotary embedding and the choice of tokens."""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch
import torch.fx

from ...ir import TensorType
from ...ir import type_of as ir_type
from ...ir.ops import all_ops
from ..own_kernels import zero_of
from . import ops  # noqa: F401  (defines ort_gqa and ort_attend)
from .emit import Emitter, row, type_of
from .pairs import Pairs
from .probe import own_attention_available

G = torch.ops.graftwork
I64 = torch.int64
HIDDEN = float("-inf")


@row(G.hidden.default)
def hidden(e: Emitter, x: oir.Value, *_: Any) -> Any:
    return x


@row(G.pick_rows.default)
def pick_rows(e: Emitter, x: oir.Value, select: oir.Value) -> Any:
    index = e.op("Unsqueeze", select, e.const([2], I64))
    return e.op("GatherND", x, index, batch_dims=1)


@row(G.take_tokens.default)
def take_tokens(e: Emitter, x: oir.Value, places: oir.Value) -> Any:
    batch, width, size = type_of(x).dims
    return e.op("Gather", e.op("Reshape", x, e.shape((batch * width, size))), places, axis=0)


def _is_floating(node: torch.fx.Node) -> bool:
    return ir_type(node).dtype.is_floating_point  # providers of GPUs move no bytes this way


@row(G.take_rows.default, when=_is_floating)
def take_rows(e: Emitter, cache: oir.Value, rows: oir.Value) -> Any:
    index = e.op("Unsqueeze", rows, e.const([3], I64))
    return e.op("GatherND", cache, index, batch_dims=2)


@row(G.cache_read.default)
def cache_read(e: Emitter, cache: oir.Value, past: oir.Value, select: oir.Value) -> Any:
    rows = e.op("Squeeze", cache, e.const([1], I64))
    first = e.op("Unsqueeze", past, e.const([1], I64))
    index = e.op("Unsqueeze", e.op("Add", first, select), e.const([2], I64))
    return e.op("GatherND", rows, index, batch_dims=1)


def has_own_read(node: torch.fx.Node) -> bool:
    """Whether graftwork's own kernel can read the rows; it comes with attention's."""
    return ir_type(node).dtype == torch.float32 and not own_attention_available()


@row(G.cache_read.default, when=has_own_read, native=True)
def own_cache_read(e: Emitter, cache: oir.Value, past: oir.Value, select: oir.Value) -> Any:
    return e.own("ReadRows", cache, past, select, chosen=1)


@row(G.ort_read_rows.default, native=True)
def read_rows(e: Emitter, cache: oir.Value, past: oir.Value, like: oir.Value) -> Any:
    return e.own("ReadRows", cache, past, like, chosen=0)


@row(G.rotary.default)
def rotary(
    e: Emitter, x: oir.Value, cos: oir.Value, sin: oir.Value, interleaved: bool = False
) -> Any:
    batch, _, width, dim = type_of(x).dims
    half = int(str(type_of(cos).dims[-1]))
    tables = []
    for table in (cos, sin):
        cast = e.cast(table, e.dtype())
        if type_of(table).dims[0] != batch:
            cast = e.op("Expand", cast, e.shape((batch, width, half)))
        tables.append(cast)
    partial = 2 * half if 2 * half != dim else None
    return e.op(
        "RotaryEmbedding", x, *tables, interleaved=int(interleaved), rotary_embedding_dim=partial
    )


@row(G.cache_write.default)
def cache_write(e: Emitter, cache: oir.Value, new: oir.Value, past: oir.Value) -> Any:
    return e.op("TensorScatter", cache, e.cast(new, e.dtype()), past, axis=2)


def _no_sinks(node: torch.fx.Node) -> bool:
    return node.kwargs.get("sinks", node.args[5] if len(node.args) > 5 else None) is None


def _cached_attention(op: str, kernel: str, caches: int) -> None:
    """The row of an op with so many caches."""
    zeros = zero_of(all_ops()[op])

    def emit(e: Emitter, query: oir.Value, key: Any, value: Any, *more: Any) -> Any:
        before, behind = more[: caches + 1], more[caches + 1 : len(more) - len(zeros)]
        options = zip(zeros.items(), more[-len(zeros) :], strict=True)
        how = {name: type(zero)(given or zero) for (name, zero), given in options}
        operands = query, *before, key, value, *behind
        return e.own(kernel, *operands, **how, threads=e.threads, outputs=1 + caches)

    row(getattr(G, op).default, native=True)(emit)


@row(G.ort_attend_keeping.default, native=True)
def _keeping_attention(e: Emitter, query: oir.Value, key: Any, value: Any, *more: Any) -> Any:
    zeros = zero_of(all_ops()["ort_attend_keeping"])
    caches, kept, behind = more[:3], more[3:5], more[5 : len(more) - len(zeros)]
    options = zip(zeros.items(), more[-len(zeros) :], strict=True)
    how = {name: type(zero)(given or zero) for (name, zero), given in options}
    operands = query, *caches, key, value, *behind, *kept
    return e.own("CachedAttention", *operands, **how, threads=e.threads, outputs=4)


@row(G.ort_put_rows.default, native=True)
def _put_rows(e: Emitter, query: oir.Value, key: Any, value: Any, *more: Any) -> Any:
    zeros = zero_of(all_ops()["ort_put_rows"])
    caches, behind = more[:3], more[3 : len(more) - len(zeros)]
    how: dict[str, Any] = {"scale": 0.0, "softcap": 0.0, "window": 0, "chunk": 0, "latest": 0}
    how |= {name: int(given or 0) for name, given in zip(zeros, more[-len(zeros) :], strict=True)}
    operands = query, *caches, key, value, *behind
    return e.own("PutRows", *operands, **how, threads=e.threads, outputs=4)


_cached_attention("ort_attend", "CachedAttention", 2)
_cached_attention("ort_attend_quantized", "CachedQuantizedAttention", 4)


@row(G.attend.default, when=_no_sinks)
def attend(
    e: Emitter,
    q: oir.Value,
    k: oir.Value,
    v: oir.Value,
    mask: oir.Value,
    bias: oir.Value | None,
    sinks: None,
    scale: float,
    softcap: float | None,
) -> Any:
    visible = mask
    if bias is not None:
        hidden_value = e.const(HIDDEN, type_of(bias).dtype)
        visible = e.op("Where", mask, bias, hidden_value)
        visible = e.cast(visible, e.dtype(), type_of(bias).dtype)
    keys, values = e.cast(k, e.dtype()), e.cast(v, e.dtype())
    if not e.paired or type_of(q).dims[2] == 1:
        # A lone query has a kernel that reads keys as they lie, if nothing is to be multiplied.
        scaled = e.op("Mul", q, e.const(scale, e.dtype()))
        return e.op("Attention", scaled, keys, values, visible, scale=1.0, softcap=softcap)
    pairs = Pairs(e, type_of(q).dims[2])
    both = [pairs.doubled(x, 2, 4) for x in (q, visible)]
    out = e.op("Attention", both[0], keys, values, both[1], scale=scale, softcap=softcap)
    return pairs.first(out, 2)


@row(G.ort_gqa.default)
def gqa(
    e: Emitter,
    query: oir.Value,
    key: oir.Value | None,
    value: oir.Value | None,
    past_key: oir.Value,
    past_value: oir.Value,
    seqlens: oir.Value,
    total: oir.Value,
    positions: oir.Value | None,
    cos: oir.Value | None,
    sin: oir.Value | None,
    ancestors: oir.Value | None,
    sinks: oir.Value | None,
    slopes: oir.Value | None,
    heads: int,
    groups: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    interleaved: bool,
) -> Any:
    width = type_of(query).dims[1]
    # One token by construction is a draft's own.
    pairs = Pairs(e, width) if e.paired and width != 1 else None
    bias = None
    if ancestors is not None or slopes is not None:
        build = _Bias(e, seqlens, total, positions, type_of(query))
        bias = build.of(ancestors, slopes, window)
    if pairs is not None:
        query, key, value = (pairs.doubled(x, 1, 3) for x in (query, key, value))
        positions, bias = pairs.doubled(positions, 1, 2), pairs.bias(bias)
        seqlens, total = pairs.raised(seqlens), pairs.raised(total)
    rotates = cos is not None
    attended, *caches = e.fused(
        "GroupQueryAttention",
        query,
        key,
        value,
        past_key,
        past_value,
        seqlens,
        total,
        cos,
        sin,
        positions if rotates else None,
        bias,
        sinks,
        num_heads=heads,
        kv_num_heads=groups,
        scale=scale,
        do_rotary=int(rotates),
        rotary_interleaved=int(interleaved) if rotates else None,
        softcap=softcap,
        # A tree's window counts positions, not rows, and is part of the bias.
        local_window_size=window if ancestors is None else None,
        outputs=3,
    )
    return (pairs.first(attended, 1) if pairs else attended, *caches)


class _Bias:
    """Attention bias [B|1, H|1, T, total] of one step, made once for all layers that share it."""

    def __init__(
        self,
        e: Emitter,
        seqlens: oir.Value,
        total: oir.Value,
        positions: oir.Value | None,
        query: TensorType,
    ) -> None:
        self.e, self.seqlens, self.total, self.given = e, seqlens, total, positions
        self.dtype, self.width = query.dtype, query.dims[1]

    def of(self, ancestors: oir.Value | None, slopes: oir.Value | None, window: int | None) -> Any:
        """The sum of the parts that apply."""
        parts = []
        tree = ancestors is not None
        if ancestors is not None:
            parts.append(self.once(("tree", window), lambda: self.tree(ancestors, window)))
        if slopes is not None:
            key = ("slopes", slopes.name, tree)
            parts.append(self.once(key, lambda: self.alibi(slopes, tree)))
        if len(parts) == 1:
            return parts[0]
        return self.once(("both", *parts), lambda: self.e.op("Add", *parts))

    def once(self, key: Any, make: Any) -> Any:
        """`make()`, or what it gave before."""
        return self.e.once(("bias", key, self.dtype), make)

    def steps(self) -> Any:
        """Columns of the step i64[T]."""
        e = self.e
        zero, one = e.const(0, I64), e.const(1, I64)
        return self.once("steps", lambda: e.op("Range", zero, e.scalar(self.width), one))

    def last(self) -> Any:
        """T - 1, i64[1], worked out where the columns are: a size is in the host's memory."""
        e = self.e
        end = e.const([-1], I64)
        return self.once("last", lambda: e.op("Gather", self.steps(), end, axis=0))

    def past(self) -> Any:
        """Valid rows before the step, i64[B]."""
        e = self.e
        return self.once("past", lambda: e.op("Sub", e.cast(self.seqlens, I64), self.last()))

    def rows(self) -> Any:
        """Rows of the caches i64[total]. `total` may stay in the host's memory."""
        e = self.e
        zero, one = e.const(0, torch.int32), e.const(1, torch.int32)
        return self.once(
            "rows", lambda: e.cast(e.op("Range", zero, self.total, one), I64, torch.int32)
        )

    def place(self) -> Any:
        """Column of the step that is in each row, i64[total]; below 0 in rows of the past."""
        return self.once("place", lambda: self.e.op("Sub", self.rows(), self.past()))

    def in_step(self, of_steps: oir.Value, of_past: oir.Value, axis: int) -> Any:
        """By row, what there is for its column of the step, or for the past."""
        e = self.e
        inside = self.once(
            "inside",
            lambda: e.op("Min", e.op("Max", self.place(), e.const(0, I64)), self.last()),
        )
        before = self.once("before", lambda: e.op("Less", self.place(), e.const(0, I64)))
        return e.op("Where", before, of_past, e.op("Gather", of_steps, inside, axis=axis))

    def positions(self) -> Any:
        """Position of each token, i64[B,T]."""
        if self.given is not None:
            return self.given
        e, first = self.e, self.e.const([1], I64)
        return self.once(
            "positions", lambda: e.op("Add", e.op("Unsqueeze", self.past(), first), self.steps())
        )

    def tree(self, ancestors: oir.Value, window: int | None) -> Any:
        """0 where a token may look, -inf elsewhere: the past is open, the step as ancestors say."""
        e = self.e
        step = e.op("Where", ancestors, e.const(0, self.dtype), e.const(HIDDEN, self.dtype))
        step = e.op("Unsqueeze", step, e.const([1], I64))
        # Behind the step's own columns there may be more, up to `total`; causality hides them.
        open_ = self.in_step(step, e.const(0, self.dtype), 3)
        if window is None:
            return open_
        near = e.op("Greater", self.distance(True), e.const(-window, I64))
        return e.op("Where", near, open_, e.const(HIDDEN, self.dtype))

    def distance(self, tree: bool) -> Any:
        """Row position minus token position, i64[B|1, 1, T, total]."""
        return self.once(("distance", tree), lambda: self._distance(tree))

    def _distance(self, tree: bool) -> Any:
        e = self.e
        positions, rows = self.positions(), self.rows()
        if tree:  # rows of the step hold the positions of its tokens
            own = e.op("Reshape", positions, e.const([-1], I64))
            rows = self.in_step(own, rows, 0)
        mine = e.op("Unsqueeze", positions, e.const([1, 3], I64))
        return e.op("Sub", rows, mine)

    def alibi(self, slopes: oir.Value, tree: bool) -> Any:
        """slope * distance for every head."""
        e = self.e
        wide = e.op("Cast", self.distance(tree), to=int(oir.DataType.FLOAT))
        column = e.op("Reshape", e.cast(slopes, torch.float32), e.const([1, -1, 1, 1], I64))
        product = e.op("Mul", column, wide)
        return e.cast(product, self.dtype, torch.float32)
