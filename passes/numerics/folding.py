"""Which weights can take over a scaling of a value's channels, found by following the graph back.

A value x that products read may be divided by a factor a channel where their weights are multiplied
by it. The division goes into what makes x: the gain of a norm, the rows of a product (through
activations that keep factors: the linear side of a gated MLP, relu), or those that make the values
which an attention adds up. Heads that share values share factors. Nothing else may read what is
scaled on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor

from ...ir import type_of

A, G = torch.ops.aten, torch.ops.graftwork

_MOVES = {op.default for op in (A.view, A.reshape, A._unsafe_view, A.clone, A.contiguous)} | {
    A.transpose.int
}
"""Ops that only move values."""


class Rows(NamedTuple):
    """Entries of a weight along its first axis."""

    weight: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """Where the factors of a value's channels go.

    rows: of weights, each as many as there are factors. states: caches whose contents are scaled
    with them. sharing: (groups, heads of a group, channels of a head) where heads share factors.
    """

    rows: tuple[Rows, ...]
    states: tuple[str, ...] = ()
    sharing: tuple[int, int, int] | None = None

    def pooled(self, channels: Tensor) -> Tensor:
        """One number a factor, of one a channel: the mean of those that share it."""
        return channels if self.sharing is None else channels.view(self.sharing).mean(1).flatten()

    def spread(self, factors: Tensor) -> Tensor:
        """One number a channel, of one a factor."""
        if self.sharing is None:
            return factors
        groups, heads, size = self.sharing
        return factors.view(groups, 1, size).expand(groups, heads, size).flatten()


def fold_of(value: torch.fx.Node) -> Fold | None:
    """Where the factors of a value [...,K] go; None if its channels cannot be scaled."""
    find = _RULES.get(value.target)
    return find(value) if find is not None else None


def _of_weights(node: torch.fx.Node) -> Fold | None:
    """A norm, or a product: its weight and its bias."""
    return _rows([arg for arg in node.args[1:3] if isinstance(arg, torch.fx.Node)])


def _of_result(node: torch.fx.Node) -> Fold | None:
    """One of several results: the norm of a sum and a norm, or a part of a product."""
    source, index = node.args
    assert isinstance(source, torch.fx.Node) and isinstance(index, int)
    if source.target is G.add_rms_norm.default:
        weight = source.args[2]
        return _rows([weight]) if index == 0 and isinstance(weight, torch.fx.Node) else None
    if source.target is not A.split_with_sizes.default or len(source.args) < 3:
        return None
    product, sizes, axis = source.args[:3]
    whole = isinstance(product, torch.fx.Node) and product.target is A.linear.default
    if not whole or axis != -1 or len(product.users) > 1:  # type: ignore[union-attr]
        return None
    given: Any = sizes
    start = sum(given[:index])
    parts = [arg for arg in product.args[1:3] if isinstance(arg, torch.fx.Node)]  # type: ignore[union-attr]
    return _rows(parts, start, start + given[index])


def _through(node: torch.fx.Node, place: int = 0) -> Fold | None:
    """What an op keeps the factors of."""
    source = node.args[place]
    alone = isinstance(source, torch.fx.Node) and len(source.users) == 1
    return fold_of(source) if alone else None  # type: ignore[arg-type]


def _of_heads(node: torch.fx.Node) -> Fold | None:
    """An attention's heads beside each other: scaled where the values are made."""
    attention = _moved(node)
    if attention is None or attention.target not in (G.attention.default, G.attend.default):
        return None
    values, states = attention.args[2], ()
    if isinstance(values, torch.fx.Node) and values.target is G.cache_write.default:
        cache, values, *_ = values.args
        states = (str(cache.target),)  # type: ignore[union-attr, assignment]
    source = _moved(values)
    if source is None:
        return None
    query, value = attention.args[0], type_of(values)  # type: ignore[arg-type]
    heads, groups, size = type_of(query).dims[1], value.dims[1], value.dims[3]  # type: ignore[arg-type]
    widths = type_of(node).dims[-1], type_of(source).dims[-1]
    fold = fold_of(source)
    if fold is None or widths != (heads * size, groups * size):
        return None
    return Fold(fold.rows, states, (groups, heads // groups, size))  # type: ignore[operator, arg-type]


def _moved(node: Any) -> torch.fx.Node | None:
    """What a value is that was only moved, by ops that nobody else reads."""
    while isinstance(node, torch.fx.Node) and node.target in _MOVES:
        node = node.args[0]
        if isinstance(node, torch.fx.Node) and len(node.users) > 1:
            return None
    return node if isinstance(node, torch.fx.Node) else None


def _rows(parts: list[torch.fx.Node], start: int = 0, stop: int | None = None) -> Fold | None:
    """Weights, if they are weights and nothing else reads them."""
    found = []
    for part in parts:
        if part.op != "get_attr" or len(part.users) > 1:
            return None
        others = part.graph.find_nodes(op="get_attr")
        if sum(other.target == part.target for other in others) > 1:
            return None
        size = int(str(type_of(part).dims[0]))
        found.append(Rows(str(part.target), start, size if stop is None else stop))
    return Fold(tuple(found)) if found else None


def factors_into(tensor: Tensor, rows: Rows, factors: Tensor) -> Tensor:
    """A weight with some of its entries divided by factors, in float32."""
    made = tensor.float().clone()
    shape = (-1, *[1] * (made.dim() - 1))
    made[rows.start : rows.stop] /= factors.view(shape)
    return made


_RULES: dict[Any, Callable[[torch.fx.Node], Fold | None]] = {
    **dict.fromkeys((G.rms_norm.default, G.layer_norm.default, A.linear.default), _of_weights),
    operator.getitem: _of_result,
    G.glu.default: partial(_through, place=1),
    A.relu.default: _through,
    **dict.fromkeys(_MOVES, _of_heads),
}
