"""Merging matrix products that read the same value into one; what `fuse_qkv` and `fuse_gate_up` do.

One product streams the same bytes as three and starts its threads once. The products must be the
same op on the same input, own their weights, and agree in everything but their number of outputs
and in having a bias. Which ops are products, and of what, they say themselves (`ir.ops.Product`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ...ir import (
    Function,
    Program,
    TensorType,
    WeightStore,
    arguments,
    derivation,
    derive,
    site_of,
    type_of,
)
from ...ir.ops import Product, op_of
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Outcome
from ..engine.functions import TARGET, edit_with_weights

A, G = torch.ops.aten, torch.ops.graftwork

LINEAR = Product(("weight", "bias"), inner=1)
"""What `aten.linear` is."""

_REACH = 64  # calls between a projection and attention; norms and rotations by hand take 20


def product_of(node: Any) -> Product | None:
    """What product a call is; None for anything else."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    if node.target is A.linear.default:
        return LINEAR
    op = op_of(node.target)
    return None if op is None else op.product


def source_product(node: Any) -> Any:
    """The one product that an argument of an attention is made from (else the argument itself)."""
    found: set[torch.fx.Node] = set()
    seen: set[torch.fx.Node] = set()
    stack = [node] if isinstance(node, torch.fx.Node) else []
    while stack and len(seen) < _REACH:
        current = stack.pop()
        if product_of(current):
            found.add(current)
        elif current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return found.pop() if len(found) == 1 and not stack else node


def merging(program: Program, merge: Callable[[Merger], None], what: str) -> Outcome:
    """What a pass makes that merges products in the target's functions; those of drafts keep the
    weights by whose names they are trained. what: what has such products."""

    def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
        merger = Merger(fn, weights)
        merge(merger)
        sweep(fn)
        return merger.merged or next(iter(merger.refusals), f"no {what}"), merger.weights

    return edit_with_weights(program, edit, TARGET)


@dataclass
class Merger:
    """Merges groups of products in one function (a copy); collects weights and refusals."""

    fn: Function
    weights: WeightStore
    merged: int = 0
    refusals: list[str] = field(default_factory=list)

    def merge(self, group: Sequence[Any]) -> None:
        """Merge the products if they may be; else note why not."""
        reason = _refusal(group)
        if reason is None:
            self._merge(group)
            self.merged += 1
        elif not isinstance(group[0], torch.fx.Node) or product_of(group[0]):
            self.refusals.append(reason)

    def merge_attention(self) -> None:
        """The projections of every attention."""
        for node in self.fn.calls(G.attention.default, G.attend.default, G.attend_rows.default):
            self.merge([source_product(argument) for argument in node.args[:3]])

    def merge_gates(self) -> None:
        """Gate and up of every `glu`."""
        for node in self.fn.calls(G.glu.default):
            self.merge(list(node.args[:2]))

    def _merge(self, group: Sequence[torch.fx.Node]) -> None:
        first = min(group)  # fx nodes compare by their place in the graph
        columns = [_stored(node) for node in group]
        sizes = [int(str(type_of(parts["weight"]).dims[0])) for parts in columns]
        with self.fn.graph.inserting_before(first):
            joined = {
                name: self._joined([parts[name] for parts in columns], sizes)
                for name in columns[0]
                if any(parts[name] for parts in columns)
            }
            site = site_of(first)
            given: Any = {**_places(first), **first.kwargs, **joined}
            merged = self.fn.call(first.target, site=site, **given)  # type: ignore[arg-type]
            split = self.fn.call(A.split_with_sizes.default, merged, sizes, -1, site=site)
            pieces = [self.fn.item(split, index) for index in range(len(group))]
        for node, piece in zip(group, pieces, strict=True):
            piece.meta["site"] = site_of(node)  # whose rows they are, exports want to know
        for node, piece in zip(group, pieces, strict=True):
            self.fn.replace(node, piece)

    def _joined(self, parts: Sequence[Any], sizes: Sequence[int]) -> torch.fx.Node:
        """The parts' weights, one after the other along their first axis; zeros for no bias."""
        given = [None if part is None else self.weights[str(part.target)] for part in parts]
        sources = [weight for weight in given if weight is not None]
        head = sources[0].type

        type = TensorType(head.dtype, (sum(sizes), *head.dims[1:]))
        name = fresh_name(self.weights, _joined_name([w.name for w in sources]))
        made = derive(name, type, joined, *given, sizes=tuple(sizes))
        weight = self.weights.alike(made)
        self.weights = self.weights.adding(weight)
        return self.fn.weight(weight)


@derivation
def joined(*tensors: torch.Tensor | None, sizes: tuple[int, ...]) -> torch.Tensor:
    """Tensors one after the other along their first axis; zeros of its size for None."""
    dtype = next(tensor.dtype for tensor in tensors if tensor is not None)
    parts = zip(tensors, sizes, strict=True)
    return torch.cat([torch.zeros(n, dtype=dtype) if t is None else t for t, n in parts])


def _joined_name(names: Sequence[str]) -> str:
    """``layers.0.q.weight``, ``layers.0.k.weight``: ``layers.0.q_k.weight``."""
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) > 1:
        return "_".join(names)
    columns = (list(dict.fromkeys(column)) for column in zip(*parts, strict=True))
    return ".".join("_".join(column) for column in columns)


def _places(node: torch.fx.Node) -> dict[str, Any]:
    """The operands of a call that have places, by name."""
    places = [a.name for a in node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]
    return {name: arguments(node)[name] for name in places}


def _refusal(group: Sequence[Any]) -> str | None:
    for node in group:
        if not product_of(node):
            return f"{node} is not a linear layer"
        if not _owns_weights(node):
            return f"%{node.name} shares its weight with something else"
    if len(set(group)) != len(group):
        return f"%{group[0].name} is one product already"
    first = group[0]
    for node in group[1:]:
        if node.args[0] is not first.args[0]:
            return f"%{first.name} and %{node.name} read different values"
        alike = node.target is first.target and node.kwargs == first.kwargs
        if not alike or _shape(node) != _shape(first):
            return f"%{first.name} and %{node.name} differ in dtype or numerics"
    return None


def _stored(node: torch.fx.Node) -> dict[str, Any]:
    """What a product has of rows for each output, by name; None for what it has not."""
    product, given = product_of(node), arguments(node)
    assert product is not None
    return {name: given[name] for name in product.stored}


def _shared(node: torch.fx.Node) -> list[Any]:
    """What products of one group have in common besides x, weights by name."""
    stored = _stored(node)
    given = list(arguments(node).items())[1:]
    rest = [value for name, value in given if name not in stored]
    return [value.target if isinstance(value, torch.fx.Node) else value for value in rest]


def _shape(node: torch.fx.Node) -> list[Any]:
    """What must agree: the result's dtype, dtypes and inner dims of all parts but the bias, and
    what is shared."""
    product = product_of(node)
    assert product is not None
    parts = [p and type_of(p) for p in list(_stored(node).values())[: product.inner]]
    inner = [part and (part.dtype, part.dims[1:]) for part in parts]
    return [type_of(node).dtype, *inner, *_shared(node)]


def _owns_weights(node: torch.fx.Node) -> bool:
    parts = [p for p in _stored(node).values() if p is not None]
    options = not any(isinstance(value, torch.fx.Node) for value in node.kwargs.values())
    return options and all(
        isinstance(p, torch.fx.Node) and p.op == "get_attr" and len(p.users) == 1 for p in parts
    )
