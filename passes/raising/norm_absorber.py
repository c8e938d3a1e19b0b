"""Norms take in the casts, the gain and the shift around them. Used by `raise_norms`, which see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, WeightStore, site_of, type_of
from ..fusing.fold_constants import folded_weight

A, G = torch.ops.aten, torch.ops.graftwork


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
