"""Turns cached attention into single kernels: graftwork's own, or ONNX Runtime's.

Before::

    %q: f32[B,4,T,16] = graftwork.rotary(%q0, %cos, %sin)
    %k: f32[B,2,T,16] = graftwork.rotary(%k0, %cos, %sin)
    %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
    %kw: f32[B,2,C,16] = graftwork.cache_write(%kv.0.key, %k, %past)
    %vw: f32[B,2,C,16] = graftwork.cache_write(%kv.0.value, %v, %past)
    %y: f32[B,4,T,16] = graftwork.attend(%q, %kw, %vw, %m, scale=0.25)

After, with %qkv f32[B,T,128] the product that query, key and value are pieces of::

    %a: (f32[B,T,64], f32[B,2,C,16], f32[B,2,C,16]) = graftwork.ort_attend(%qkv, None, None,
        %kv.0.key, %kv.0.value, %past, %positions, @cos, @sin, heads=4, groups=2, scale=0.25)

or `ort_attend_keeping`, if a write of the queries into another state is all else that reads %q; or
GroupQueryAttention's `ort_gqa`, with `%seqlens, %total` for `%past`. Kernels want caches of the
query's dtype that nothing else reads before they are written, and a step mask whose rows stand for
the positions of their numbers. graftwork's takes float32; the other one equal key and value widths
in multiples of 8 (16 where it rotates), and no chunks. An attention that is otherwise stays as it
is.

graftwork's own kernel takes heads out of wider operands (caches of some heads, see the pass
split_heads), writes a key for several heads of a cache (`query_heads`), and knows where windows are
in caches of the latest rows (`layer_budgets`). What another op attends over is put into the caches
by its `ort_put_rows`, in one step with the rotation.

A function may go on after its tokens, one more at a time (an unrolled chain): such an attention
reads the cache that the one before wrote, and counts its rows from its own `past`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx

from ...ir import Function, TensorType, WeightStore, arguments, derivation, derive, site_of, type_of
from ...ir.ops.attention import SPANS
from . import ops  # noqa: F401  (defines ort_gqa and ort_attend)
from .calls import source_of
from .heads import Heads, heads_of, latest_of
from .put_rows import put_rows
from .tables import Tables, rotation_of
from .views import TURNS, axis_order, packed_of

A = torch.ops.aten
G = torch.ops.graftwork

SEQLENS, TOTAL = "seqlens", "total"
"""Inputs of lowered functions: i32[B] past + T - 1, and i32[] the width of the attention bias."""


OVERHANG = 128
"""Rows past the context that a step may write: the last columns of a tree are never committed."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that attention may become.

    ops: what stands for it, by the op of the attention that it does. keeping: the same, where it
    keeps queries. takes: whether it does, of
    query, key and value types. turns: whether
    it rotates heads of a width by angles of half of what they turn. own_tokens: whether a function
    may feed it several tokens that are none of its inputs. counts: whether it takes counts of rows
    where others take `past`. chunks: whether tokens may see their own chunk alone. picks: whether
    it takes heads out of wider operands, and looks back from where the latest rows stand.
    """

    ops: Mapping[Any, Any]
    keeping: Mapping[Any, Any]
    takes: Callable[[TensorType, TensorType, TensorType], bool]
    turns: Callable[[int, int], bool]
    own_tokens: bool
    counts: bool
    chunks: bool
    picks: bool


def _takes_alike(query: TensorType, key: TensorType, value: TensorType) -> bool:
    width = query.dims[3]
    alike = key.dims == value.dims and key.dims[3] == width
    return isinstance(width, int) and width % 8 == 0 and alike


def _takes_float32(query: TensorType, key: TensorType, value: TensorType) -> bool:
    return query.dtype == torch.float32


Counted = Literal["chain", "tree"]
"""Variants of a step whose attention is GroupQueryAttention, which takes counts of rows."""

GQA = Kernel(
    {G.attend.default: G.ort_gqa.default},
    keeping={},
    takes=_takes_alike,
    turns=lambda width, half: width % 16 == 0 and half % 8 == 0,
    own_tokens=False,
    counts=True,
    chunks=False,
    picks=False,
)
OWN = Kernel(
    {
        G.attend.default: G.ort_attend.default,
        G.attend_quantized.default: G.ort_attend_quantized.default,
    },
    keeping={G.attend.default: G.ort_attend_keeping.default},
    takes=_takes_float32,
    turns=lambda width, half: True,
    own_tokens=True,
    counts=False,
    chunks=True,
    picks=True,
)


def lower_attention(
    fn: Function, weights: WeightStore, kernel: Kernel = GQA, *, counted: bool = False
) -> WeightStore:
    """Edit in place (hand in a copy); returns the weights with rotary tables in the right dtype.

    counted: let the kernel count positions from its rows instead of reading the input.
    """
    lowering = _Lowering(fn, weights, kernel, counted)
    for node in fn.calls(*kernel.ops):
        found = _match(fn, node, kernel)
        if found is not None:
            lowering.replace(found)
    if kernel.picks:
        put_rows(fn, lowering.flat, lowering.table)
    return lowering.weights


@dataclass
class _Found:
    """One attention that the kernel can do."""

    node: torch.fx.Node
    query: torch.fx.Node
    key: torch.fx.Node
    value: torch.fx.Node
    heads: tuple[Any, Any]
    writes: tuple[torch.fx.Node, ...]
    past: torch.fx.Node
    positions: torch.fx.Node
    ancestors: torch.fx.Node | None
    slopes: torch.fx.Node | None
    sinks: torch.fx.Node | None
    tables: Tables | None
    options: dict[str, Any]
    keeping: torch.fx.Node | None
    """The write that keeps the queries, if the kernel can do it."""


def _match(fn: Function, node: torch.fx.Node, kernel: Kernel) -> _Found | None:
    given = arguments(node)
    mask = given["mask"]
    writes = [given[name] for name in ("k", "v", "k_steps", "v_steps") if name in given]
    if any(n.target is not G.cache_write.default for n in writes):
        return None
    if mask.target is not G.step_mask.default:
        return None
    written = [arguments(write) for write in writes]
    new_key, new_value = (_rows(write["new"], given.get("bits")) for write in written[:2])
    if [_rows(write["new"], given.get("bits")) for write in written[2:]] not in (
        [],
        [new_key, new_value],
    ):
        return None
    masked = arguments(mask)
    past, positions = masked["past"], masked["positions"]
    latest = latest_of(positions, past) if kernel.picks else None
    positions = positions if latest is None else latest
    if masked["row_positions"] is not None:  # kernels take a row's number for its position
        return None
    if masked["chunk"] is not None and not kernel.chunks:
        return None
    ancestors = masked["ancestors"]
    if ancestors is not None and ancestors.op != "placeholder" and not kernel.own_tokens:
        return None  # made for any batch, where biases are for one sequence
    if {write["past"] for write in written} != {past}:
        return None
    fed = past is fn.input("past") and masked["positions"] is fn.input("positions")
    if not fed and not kernel.own_tokens and type_of(given["q"]).dims[2] != 1:
        return None
    if not kernel.takes(*map(type_of, (given["q"], new_key, new_value))):
        return None
    if not _fits(given["q"], writes, node):
        return None
    slopes = _slopes(given["bias"], past, positions)
    if given["bias"] is not None and (slopes is None or latest is not None):
        return None
    whole = heads_of(given["q"], new_key, new_value) if kernel.picks else None
    whole = whole or Heads(given["q"], new_key, new_value)
    query, key, tables = rotation_of(whole.q, whole.k, positions, kernel.turns)
    how = ("scale", "softcap", "bits", "turned")
    options = {name: given[name] for name in how if name in given} | whole.options
    if latest is not None:
        options["latest"] = True
    options |= {name: masked[name] for name in SPANS}
    return _Found(
        node=node,
        query=query,
        key=key,
        value=whole.v,
        heads=(type_of(given["q"]).dims[1], type_of(new_key).dims[1]),
        writes=tuple(writes),
        past=past,
        positions=positions,
        ancestors=ancestors,
        slopes=slopes,
        sinks=given["sinks"],
        tables=tables,
        options=options,
        keeping=_keeping(fn, given["q"], node) if node.target in kernel.keeping else None,
    )


def _keeping(fn: Function, q: torch.fx.Node, attend: torch.fx.Node) -> torch.fx.Node | None:
    """The only other reader of the queries, if it writes them into a state of their dtype."""
    others = set(q.users) - {attend}
    if len(others) != 1:
        return None
    (write,) = others
    if write.target is not G.cache_write.default or write.args[1] is not q:
        return None
    state = arguments(write)["cache"]
    alone = state.op == "placeholder" and len(state.users) == 1
    return write if alone and type_of(state).dtype == type_of(q).dtype else None


def _rows(new: torch.fx.Node, bits: int | None) -> torch.fx.Node:
    """The rows that a write puts into a cache, before they were stored in so many bits."""
    if bits is None or new.target is not operator.getitem:
        return new
    made = source_of(new)
    return source_of(made) if made.target is G.quantize_rows.default else new


def _fits(q: Any, writes: Sequence[torch.fx.Node], attend: torch.fx.Node) -> bool:
    """Whether dtypes and uses of the caches are what kernels want."""
    caches = [source_of(write) for write in writes]
    floats = [c for c in caches if type_of(c).dtype.is_floating_point]
    if any(type_of(cache).dtype != type_of(q).dtype for cache in floats):
        return False
    if any(c.op == "placeholder" and len(c.users) != 1 for c in caches):
        return False
    return all(set(w.users) <= {attend} | _later(w) for w in writes)


def _later(node: torch.fx.Node) -> set[torch.fx.Node]:
    """Users of a written cache that want it as it is then: outputs, and writes of later rows."""
    return {
        user
        for user in node.users
        if user.op == "output"
        or (
            user.target is G.cache_write.default
            and user.args[0] is node
            and node not in user.args[1:]
        )
    }


def _slopes(bias: Any, past: Any, positions: Any) -> torch.fx.Node | None:
    if bias is None or bias.target is not G.alibi.default:
        return None
    given = arguments(bias)
    fits = given["past"] is past and given["positions"] is positions
    fits = fits and given["row_positions"] is None
    return given["slopes"] if fits else None


class _Lowering:
    def __init__(self, fn: Function, weights: WeightStore, kernel: Kernel, counted: bool) -> None:
        self.fn, self.weights, self.kernel, self.counted = fn, weights, kernel, counted

    def positions(self, found: _Found) -> torch.fx.Node | None:
        """The input that an attention depends on, None if it does not or is to count itself."""
        needed = found.tables or found.ancestors is not None or found.slopes is not None
        far = any(found.options[name] is not None for name in SPANS)
        needed = needed or (not self.kernel.counts and far)
        return found.positions if needed and not self.counted else None

    def counts(self, found: _Found) -> list[torch.fx.Node]:
        """`past`, or what the kernel takes instead: two inputs, added when first needed, or for a
        token that the function makes itself, computed from its own."""
        if not self.kernel.counts:
            return [found.past]
        if found.past is not self.fn.input("past"):
            rows = self.fn.call(A._to_copy.default, found.past, dtype=torch.int32)
            longest = self.fn.call(A.amax.default, rows, [0], False)
            return [rows, self.fn.call(A.add.Scalar, longest, 1)]
        for name, type in ((SEQLENS, "i32[B]"), (TOTAL, "i32[]")):
            if not self.fn.has_input(name):
                self.fn.add_input(name, TensorType.parse(type))
        return [self.fn.input(SEQLENS), self.fn.input(TOTAL)]

    def table(self, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        """A rotary table in the query's dtype, with rows for a last step that overhangs."""
        weight = self.weights[str(node.target)]
        name = f"{weight.name}.{str(dtype).removeprefix('torch.')}"
        if name not in self.weights:
            rows, half = (int(str(d)) for d in weight.type.dims)
            longer = TensorType(dtype, (rows + OVERHANG, half))
            self.weights = self.weights.adding(
                derive(name, longer, overhanging, weight, dtype=dtype)
            )
        return self.fn.weight(self.weights[name])

    def replace(self, found: _Found) -> None:
        """One kernel in the place of an attention and its cache writes."""
        fn, site = self.fn, site_of(found.node)
        dtype = type_of(found.query).dtype
        caches = [w.args[0] for w in found.writes]
        heads, groups = found.heads
        with fn.graph.inserting_before(found.node):
            counts = self.counts(found)
            pieces = [self.flat(x) for x in (found.query, found.key, found.value)]
            packed = packed_of(pieces)
            parts: list[Any] = [packed, None, None] if packed is not None else list(pieces)
            tables: list[Any] = [None, None]
            if found.tables is not None:
                tables = [self.table(t, dtype) for t in (found.tables.cos, found.tables.sin)]
                found.options["interleaved"] = found.tables.interleaved
            ops, kept = self.kernel.ops, []
            if found.keeping is not None:
                ops, keeping = self.kernel.keeping, arguments(found.keeping)
                kept = [keeping["cache"], keeping["past"]]
            result = fn.call(
                ops[found.node.target],
                *(*parts, *caches, *counts, *kept, self.positions(found), *tables),
                *(found.ancestors, found.sinks, found.slopes),
                site=site,
                heads=heads,
                groups=groups,
                **{k: v for k, v in found.options.items() if v is not None},
            )
            written = [*found.writes, *([found.keeping] if found.keeping is not None else [])]
            flat, *states = (fn.item(result, index) for index in range(1 + len(written)))
            dims = list(type_of(found.node).dims)
            spread = fn.call(A.view.default, flat, [dims[0], dims[2], dims[1], dims[3]], site=site)
            attended = fn.call(A.transpose.int, spread, 1, 2, site=site)
        found.node.replace_all_uses_with(attended)
        for write, cache in zip(written, states, strict=True):
            write.replace_all_uses_with(cache)
        for node in (found.node, *written):
            fn.graph.erase_node(node)

    def flat(self, x: torch.fx.Node) -> torch.fx.Node:
        """A value [B,H,T,D] as [B,T,H*D], reusing what it was made from."""
        batch, heads, step, width = type_of(x).dims
        swaps = x.target in TURNS and axis_order(x) == [0, 2, 1, 3]
        turned = source_of(x) if swaps else self.fn.call(A.transpose.int, x, 1, 2)
        wanted = [batch, step, int(str(heads)) * int(str(width))]
        reshaped = turned.target in (A.view.default, A.reshape.default)
        if reshaped and list(type_of(source_of(turned)).dims) == wanted:
            return source_of(turned)
        return self.fn.call(A.reshape.default, turned, wanted, site=site_of(x))


@derivation
def overhanging(table: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """The table in another dtype, its last row repeated `OVERHANG` times."""
    wanted = table.to(dtype)
    return torch.cat([wanted, wanted[-1:].expand(OVERHANG, -1)])
