"""Recognise RMS and layer normalisations, however they are spelled, and make each one op.

Before::

    %s: f32[B,T,8] = aten.pow.Tensor_Scalar(%x, 2)
    %m: f32[B,T,1] = aten.mean.dim(%s, [-1], True)
    %e: f32[B,T,1] = aten.add.Tensor(%m, 1e-06)
    %r: f32[B,T,1] = aten.rsqrt(%e)
    %n: f32[B,T,8] = aten.mul.Tensor(%x, %r)
    %y: f32[B,T,8] = aten.mul.Tensor(@weight, %n)

After::

    %y: f32[B,T,8] = graftwork.rms_norm(%x, @weight, eps=1e-06)

First the statistics are matched and become a norm whose weight is ones; then each norm takes in
what follows: casts, the gain (a weight, or something computed from weights such as gemma's ``1 +
weight``, which becomes a derived weight), a layer norm's shift, and the cast to float32 before it.
A gain that is no vector over the last axis (one for each head) stays a product behind a norm with
ones. Rows brought to a length of 1, as the keys of delta nets are, are RMS norms, too: their weight
is the root of 1/H. Refuses norms over other axes, and statistics that something else uses as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor

from ...ir import Function, Program, TensorType, Weight, WeightStore, arguments, site_of, type_of
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.match import Match
from ...ir.rewrite.rules import Builder, Rule, apply_rules
from ...ir.rewrite.subgraph import constants
from ...ir.types import DTYPE_NAMES
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_with_weights
from ..fusing.fold_constants import folded_weight

A, G = torch.ops.aten, torch.ops.graftwork
NORMS = (G.rms_norm.default, G.layer_norm.default)


@register
class RaiseNorms(Pass):
    """No options."""

    provides: ClassVar[frozenset[str]] = frozenset({"norms"})

    def run(self, program: Program) -> Outcome:
        return edit_with_weights(program, _raise)


def _raise(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
    calls, weights = _raise_calls(fn, weights)
    result = apply_rules(fn, RULES, weights)
    if not calls and not result.count:
        return result.near_miss, weights
    absorber = Absorber(fn, result.weights, constants(fn))
    for node in fn.calls(*NORMS):
        absorber.visit(node)
    sweep(fn)
    return calls + result.count, absorber.weights


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_by_product(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def _rms_by_root(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _rms_by_power(x: Tensor, eps: float) -> Tensor:
    return x * torch.pow(x.pow(2).mean(-1, keepdim=True) + eps, -0.5)


def _unit(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _centred(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)


def _centred_twice(x: Tensor, eps: float) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)


def _plain(op: Any, *bias: None) -> Callable[[Builder, Match], torch.fx.Node]:
    """A replacement: the norm with a weight of ones, in the dtype of the result."""

    def build(b: Builder, m: Match) -> torch.fx.Node:
        x, dtype = m["x"], type_of(m.root).dtype
        if type_of(x).dtype != dtype:
            x = b.call(A._to_copy.default, x, dtype=dtype)
        ones = b.add(ones_weight(b.weights, type_of(x)))
        return b.call(op, x, ones, *bias, eps=float(m.number("eps")))

    return build


def _unit_length(b: Builder, m: Match) -> torch.fx.Node:
    """A replacement for rows brought to a length of 1: an RMS norm whose weight is the root of 1/H,
    because a mean is a sum over H."""
    x = m["x"]
    width = type_of(x).dims[-1]
    assert isinstance(width, int)
    weight = filled_weight(b.weights, type_of(x), width**-0.5, "unit")
    return b.call(G.rms_norm.default, x, b.add(weight), eps=float(m.number("eps")) / width)


def _rule(pattern: Callable[..., Tensor], build: Callable[..., torch.fx.Node]) -> Rule:
    inputs = {"x": "f32[...,H]", "eps": "float"}
    casts = build is not _unit_length
    return Rule(pattern.__name__.strip("_"), inputs, pattern, build, optional_casts=casts)


# Centred ones first: what they do to the centred value is an RMS norm as well.
RULES = [
    *(_rule(p, _plain(G.layer_norm.default, None)) for p in (_centred, _centred_twice)),
    *(_rule(p, _plain(G.rms_norm.default)) for p in (_rms, _rms_by_product)),
    *(_rule(p, _plain(G.rms_norm.default)) for p in (_rms_by_root, _rms_by_power)),
    _rule(_unit, _unit_length),
]


def ones_weight(weights: WeightStore, like: TensorType) -> Weight:
    """The weight of norms without one; all of a width and dtype share it."""
    return filled_weight(weights, like, 1.0, "ones")


def filled_weight(weights: WeightStore, like: TensorType, value: float, kind: str) -> Weight:
    """A weight [H] of one number, shared by all of its kind, width and dtype."""
    width = like.dims[-1]
    assert isinstance(width, int)
    name = f"{kind}.{DTYPE_NAMES[like.dtype]}.{width}"
    if name in weights:
        return weights[name]
    return Weight.of(name, torch.full((width,), value).to(like.dtype))


def _raise_calls(fn: Function, weights: WeightStore) -> tuple[int, WeightStore]:
    """Turn torch's own layer norms over the last axis into ours."""
    count = 0
    for node in fn.calls(A.layer_norm.default, A.native_layer_norm.default):
        given, results = arguments(node), [node]
        if node.target is A.native_layer_norm.default:
            results = list(node.users)
        whole = all(user is node or user.args[1] == 0 for user in results)  # no statistics
        if len(given["normalized_shape"]) != 1 or not whole:
            continue
        x, gain, eps = given["input"], given["weight"], float(given["eps"])
        with fn.graph.inserting_before(node):
            if gain is None:
                weights = weights.adding(ones_weight(weights, type_of(x)))
                gain = fn.weight(ones_weight(weights, type_of(x)))
            new = fn.call(G.layer_norm.default, x, gain, given["bias"], eps=eps, site=site_of(node))
        for result in results:
            result.replace_all_uses_with(new)
        count += 1
    return count, weights


@dataclass
class Absorber:
    """Edits a function (a copy), collects weights. constant: nodes that depend on weights only."""

    fn: Function
    weights: WeightStore
    constant: set[torch.fx.Node]

    def visit(self, norm: torch.fx.Node) -> None:
        """Replace a norm and what follows it by one norm, as far as dtypes allow."""
        x = norm.args[0]
        assert isinstance(x, torch.fx.Node)
        sources = {type_of(x).dtype: x}
        if x.target is A._to_copy.default:
            narrow = x.all_input_nodes[0]
            sources.setdefault(type_of(narrow).dtype, narrow)
        best = None
        for end, gain, shift in self.followers(norm):
            if type_of(end).dtype in sources:
                best = end, gain, shift
        if best is not None:
            self.replace(norm, sources[type_of(best[0]).dtype], *best)

    def followers(self, norm: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, Any, Any]]:
        """Each value further down that a norm could give, with the gain and shift on the way."""
        end, gain, shift = norm, None, None
        layer = norm.target is G.layer_norm.default
        taken = not str(norm.args[1].target).startswith("ones.")  # type: ignore[union-attr]
        while len(end.users) == 1:
            user = next(iter(end.users))
            other = self.vector(user, end, norm)
            if user.target is A.mul.Tensor and other and not taken and shift is None:
                gain, taken = other, True
            elif user.target is A.add.Tensor and other and layer and not (shift or norm.args[2]):
                shift = other
            elif user.target is not A._to_copy.default:
                return
            end = user
            yield end, gain, shift

    def vector(self, user: torch.fx.Node, end: torch.fx.Node, norm: torch.fx.Node) -> Any:
        """The other operand of a product or sum, if it is a constant over the norm's last axis."""
        others = [arg for arg in user.args if arg is not end and isinstance(arg, torch.fx.Node)]
        if len(others) != 1 or others[0] not in self.constant:
            return None
        return others[0] if type_of(others[0]).dims == type_of(norm).dims[-1:] else None

    def replace(
        self, norm: torch.fx.Node, x: torch.fx.Node, end: torch.fx.Node, gain: Any, shift: Any
    ) -> None:
        with self.fn.graph.inserting_before(end):
            weight = self.weight(gain) if gain else norm.args[1]
            rest = list(norm.args[2:])
            if shift:
                rest = [self.weight(shift)]
            op: Any = norm.target
            options: dict[str, Any] = dict(norm.kwargs)
            new = self.fn.call(op, x, weight, *rest, site=site_of(norm), **options)
        end.replace_all_uses_with(new)

    def weight(self, node: torch.fx.Node) -> torch.fx.Node:
        """A weight, or what is computed from weights as one."""
        if node.op == "get_attr":
            return self.fn.weight(self.weights[str(node.target)])
        folded = folded_weight(self.fn, node, self.weights)
        self.weights = self.weights.adding(folded)
        return self.fn.weight(folded)
