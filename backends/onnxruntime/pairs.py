"""Lets a step of one token sum its attention in the order of wider steps.

Every kernel gives a token the same bits in steps of two tokens or more; attention of a single token
adds up in another order. So where activations are rounded, attention takes a lone token twice and
the first result counts, and everything else runs on one row: norms, softmax and elementwise ops
work row by row, graftwork's own kernels do, and integer products are exact at any width. A function
with other sums than these (float products, experts) takes the whole step twice instead, see
`routing`.
"""

from __future__ import annotations

import operator
from typing import Any

import onnx_ir as oir
import torch
import torch.fx

from ...ir import Dim, Function, arguments, type_of
from ...ir.ops import is_exact_by_row
from .emit import Emitter
from .rows_own import runs_own

A = torch.ops.aten
G = torch.ops.graftwork

_BY_ROW = frozenset(
    {
        operator.getitem,
        G.hidden.default,
        G.pick_rows.default,
        G.take_tokens.default,
        G.cache_read.default,
        G.ort_read_rows.default,
        G.rms_norm.default,
        G.add_rms_norm.default,
        G.layer_norm.default,
        A.layer_norm.default,
        G.rotary.default,
        G.glu.default,
        G.step_mask.default,
        G.shared_mask.default,
        G.merge_parts.default,
        G.unit_steps.default,
        G.alibi.default,
        G.distance_bias.default,
        G.cache_write.default,
        G.quantize_rows.default,
        G.quantized_embedding.default,
        A.embedding.default,
        A.argmax.default,
        A.topk.default,
        A.max.dim,
        A._softmax.default,
        A._log_softmax.default,
        A.gather.default,
        A.index_select.default,
        A.scatter.src,
        A.scatter.value,
        A.full.default,
        A.full_like.default,
        A.repeat.default,
        A.arange.start_step,
        A._to_copy.default,
        A.clone.default,
        A.view.default,
        A.reshape.default,
        A.permute.default,
        A.transpose.int,
        A.expand.default,
        A.unsqueeze.default,
        A.squeeze.dim,
        A.slice.Tensor,
        A.select.int,
        A.split_with_sizes.default,
        A.split.Tensor,
        A.chunk.default,
        A.cat.default,
    }
)
"""Ops whose kernels give a row the same bits whatever shares the step (and pointwise ones do)."""


def only_attention_needs_pairs(function: Function, *, own: bool = False) -> bool:
    """Whether a lone token's results are those of wider steps once its attention's are.

    own: whether attention is graftwork's own.
    """
    return all(_fits(node, own) for node in function.calls())


def _fits(node: torch.fx.Node, own: bool) -> bool:
    if node.target is G.attend.default:
        return own or arguments(node)["sinks"] is None  # else it may become float products
    if node.target is G.attend_quantized.default:
        return own
    if node.target is A.sum.dim_IntList:
        return _sums_alike(node)
    tags = getattr(node.target, "tags", ())
    by_row = node.target in _BY_ROW or is_exact_by_row(node)
    return by_row or torch.Tag.pointwise in tags or (own and runs_own(node))


def _sums_alike(node: torch.fx.Node) -> bool:
    """Whether each row's sum is added up in the same order: where all rows begin at multiples of
    four numbers, or have too few for a vector."""
    given = arguments(node)
    sizes = type_of(given["self"]).dims
    size = sizes[-1]
    last = list(given["dim"]) in ([-1], [len(sizes) - 1])
    return last and isinstance(size, int) and (size < 4 or size % 4 == 0)


class Pairs:
    """Doubles a step's axis of `width` tokens if that is one token; a copy if it is more."""

    def __init__(self, e: Emitter, width: Dim) -> None:
        self.e, self.width = e, width

    def count(self) -> Any:
        """Tokens after doubling, i64[1]."""
        two = self.e.const([2], torch.int64)
        return self._once("count", lambda: self.e.op("Max", self.e.size(self.width), two))

    def added(self) -> Any:
        """Tokens that doubling adds, 0 or 1, i64[1]."""
        return self._once("added", lambda: self.e.op("Sub", self.count(), self.e.size(self.width)))

    def raised(self, count: oir.Value) -> Any:
        """An i32 count of rows that includes what doubling adds."""
        e = self.e
        kind = int(oir.DataType.INT32)
        key = ("raised", count.name)
        added = self._once("added32", lambda: e.op("Cast", e.op("Squeeze", self.added()), to=kind))
        return self._once(key, lambda: e.op("Add", count, added))

    def doubled(self, value: oir.Value | None, axis: int, rank: int) -> Any:
        """A value with its tokens on `axis` doubled."""
        if value is None:
            return None
        ones = [self.e.const([1], torch.int64)]
        parts = [*ones * axis, self.count(), *ones * (rank - 1 - axis)]
        shape = self._once(("shape", axis, rank), lambda: self.e.op("Concat", *parts, axis=0))
        return self._once(("doubled", value.name, axis), lambda: self.e.op("Expand", value, shape))

    def bias(self, value: oir.Value | None) -> Any:
        """An attention bias [B|1, H|1, T, total] for doubled tokens and a `raised` total."""
        if value is None:
            return None
        both, zero = self.doubled(value, 2, 4), self.e.const([0], torch.int64)
        # The first row may not see the column that is new: it comes after it.
        pads = self._once("pads", lambda: self.e.op("Concat", *[zero] * 7, self.added(), axis=0))
        return self._once(("bias", value.name), lambda: self.e.op("Pad", both, pads))

    def first(self, value: oir.Value, axis: int) -> Any:
        """What was asked for of a value with doubled tokens on `axis`."""
        e = self.e
        zero, axes = e.const([0], torch.int64), e.const([axis], torch.int64)
        return e.op("Slice", value, zero, e.size(self.width), axes)

    def _once(self, name: Any, make: Any) -> Any:
        return self.e.once(("pairs", str(self.width), name), make)
