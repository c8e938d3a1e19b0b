"""Values of which each process holds a part along one axis, and which ops keep them so.

Used by `shard_tensors`, which see. A value is whole, or it lies in equal parts along an axis, in
the order of the processes' ranks (as a DTensor's placements `Replicate` and `Shard` say).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ...ir import TensorType, arguments, type_of
from ...ir.types import Dim, make_dim

A, G = torch.ops.aten, torch.ops.graftwork

BY_ELEMENT = frozenset(
    {
        *(A.add.Tensor, A.sub.Tensor, A.mul.Tensor, A.div.Tensor, A.neg.default, A.abs.default),
        *(A.silu.default, A.gelu.default, A.relu.default, A.sigmoid.default, A.tanh.default),
        *(A.exp.default, A.sqrt.default, A.rsqrt.default, A.reciprocal.default),
        *(A.pow.Tensor_Scalar, A.clamp.default, A.clamp_min.default, A.softplus.default),
        *(A.maximum.default, A.minimum.default, A._to_copy.default, A.where.self),
        *(A.hardtanh.default, A.leaky_relu.default, A.elu.default),
        G.glu.default,
    }
)
"""Each element of the result is made of those at its place, operands broadcast to one shape."""

BY_HEAD = frozenset({G.attention.default, G.rotary.default})
"""Each head of the result [B,H,...] is made of that head of the operands."""

BY_ROW = frozenset({G.rms_norm.default, G.layer_norm.default})
"""The last axis is taken as a whole."""


class NotSpread(Exception):
    """Why a value cannot be held in parts."""


@dataclass(frozen=True)
class Cut:
    """A weight of which each process takes its part: the call, its operand, the axis."""

    user: torch.fx.Node
    operand: torch.fx.Node
    axis: int


@dataclass
class Region:
    """What lies between products with weights and a product of what they gave.

    enter: products of whole values, whose outputs are spread. inner: the calls between, in order.
    leave: the product that takes the spread values; its sum over the processes is whole again.
    """

    enter: list[torch.fx.Node]
    inner: list[torch.fx.Node]
    leave: torch.fx.Node
    parts: int
    axes: dict[torch.fx.Node, int] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)

    def spread(self) -> None:
        """Find the axis along which each value is spread. Errors: `NotSpread`."""
        for node in self.enter:
            outputs = len(type_of(node).dims) - 1
            self._divides(node, type_of(node).dims[outputs])
            self.axes[node] = outputs
        for node in self.inner:
            spread = [arg for arg in node.all_input_nodes if arg in self.axes]
            if spread:
                self.axes[node] = self._axis(node)
        x = self.leave.all_input_nodes[0]
        if self.axes.get(x) != len(type_of(x).dims) - 1:
            raise NotSpread(f"%{self.leave.name} sums over an axis that is not spread")
        known = {*self.enter, *self.inner, self.leave}
        for node in self.axes:
            others = [user for user in node.users if user not in known]
            if others:
                raise NotSpread(f"%{others[0].name} reads %{node.name} whole")

    def _axis(self, node: torch.fx.Node) -> int:
        """The axis along which a call's result is spread."""
        if node.target in BY_ELEMENT:
            return self._by_element(node)
        if node.target in BY_HEAD:
            return self._by_head(node)
        named = arguments(node)
        x: Any = named.get("x", named.get("self"))
        if node.target in BY_ROW:
            return self._kept(node, x, but=(-1,))
        if node.target is A.reshape.default:
            return self._reshaped(node, x)
        if node.target is A.permute.default:
            order = [int(axis) % len(type_of(x).dims) for axis in named["dims"]]
            return order.index(self.axes[x])
        if node.target is A.slice.Tensor:
            return self._kept(node, x, but=(named["dim"],))
        if node.target is A.select.int:
            axis = self._kept(node, x, but=(named["dim"],))
            return axis - int(named["dim"] % len(type_of(x).dims) < axis)
        if node.target is A.unsqueeze.default:
            place = named["dim"] % (len(type_of(x).dims) + 1)
            return self.axes[x] + int(place <= self.axes[x])
        if node.target is A.cat.default:
            return self._joined(node, named["tensors"], named["dim"])
        raise NotSpread(f"%{node.name} ({node.target}) may mix what different processes hold")

    def _kept(self, node: torch.fx.Node, x: torch.fx.Node, but: Sequence[int]) -> int:
        """The operand's axis, which must not be one that the call works on."""
        axis = self.axes[x]
        if axis in [other % len(type_of(x).dims) for other in but]:
            raise NotSpread(f"%{node.name} ({node.target}) works along the axis that is spread")
        return axis

    def _by_element(self, node: torch.fx.Node) -> int:
        rank = len(type_of(node).dims)
        (behind, *others) = {
            len(type_of(arg).dims) - self.axes[arg]
            for arg in node.all_input_nodes
            if arg in self.axes
        }
        if others:
            raise NotSpread(f"%{node.name} ({node.target}) joins values spread along two axes")
        for operand in node.all_input_nodes:
            dims = type_of(operand).dims
            if operand not in self.axes and len(dims) >= behind and dims[-behind] != 1:
                self._cut(node, operand, len(dims) - behind)
        return rank - behind

    def _by_head(self, node: torch.fx.Node) -> int:
        """Operands [B,H,...] spread by head; those [H] are cut, those without heads whole."""
        for name, operand in arguments(node).items():
            if not isinstance(operand, torch.fx.Node) or name in ("cos", "sin"):
                continue
            if operand in self.axes:
                if self.axes[operand] != 1:
                    raise NotSpread(f"%{node.name}: %{operand.name} is not spread by head")
            elif len(type_of(operand).dims) == 1:
                self._cut(node, operand, 0)
            else:
                raise NotSpread(f"%{node.name}: %{operand.name} has all heads in every process")
        return 1

    def _reshaped(self, node: torch.fx.Node, x: torch.fx.Node) -> int:
        """The axis of the result that begins where the spread one does."""
        before = _product(type_of(x).dims[: self.axes[x]])
        dims = type_of(node).dims
        for axis, dim in enumerate(dims):
            if dim != 1 and _product(dims[:axis]) == before:
                self._divides(node, dim)
                return axis
        raise NotSpread(f"%{node.name} reshapes across the axis that is spread")

    def _joined(self, node: torch.fx.Node, tensors: Sequence[torch.fx.Node], dim: int) -> int:
        if any(part not in self.axes for part in tensors):
            raise NotSpread(f"%{node.name} joins what is spread and what is not")
        axes = {self._kept(node, part, but=(dim,)) for part in tensors}
        if len(axes) > 1:
            raise NotSpread(f"%{node.name} joins values spread along two axes")
        return axes.pop()

    def _cut(self, node: torch.fx.Node, operand: torch.fx.Node, axis: int) -> None:
        if operand.op != "get_attr":
            raise NotSpread(f"%{node.name} needs its part of %{operand.name}, which is whole")
        self._divides(node, type_of(operand).dims[axis])
        self.cuts.append(Cut(node, operand, axis))

    def _divides(self, node: torch.fx.Node, dim: Dim) -> None:
        if not isinstance(dim, int) or dim % self.parts:
            raise NotSpread(
                f"%{node.name} {_text(node)}: {dim} do not divide among {self.parts} processes"
            )


def _text(node: torch.fx.Node) -> str:
    value = node.meta["type"]
    return str(value) if isinstance(value, TensorType) else ""


def _product(dims: Sequence[Any]) -> Dim:
    return make_dim("*".join(f"({dim})" for dim in dims) or "1")


def region_of(leave: torch.fx.Node, parts: int) -> Region | None:
    """What is between a product and the products that its operand comes from; None if nothing is
    spread by cutting those, because the product reads the residual stream or a norm of it."""
    enter: list[torch.fx.Node] = []
    inner: list[torch.fx.Node] = []
    seen: set[torch.fx.Node] = set()
    todo = [leave.all_input_nodes[0]]
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function" or node.target is G.hidden.default:
            continue
        seen.add(node)
        if node.target is A.linear.default:
            enter.append(node)
            continue
        inner.append(node)
        todo.extend(node.all_input_nodes)
    if not enter:
        return None
    order = {node: place for place, node in enumerate(leave.graph.nodes)}
    enter.sort(key=order.__getitem__)
    inner.sort(key=order.__getitem__)
    return Region(enter, inner, leave, parts)
