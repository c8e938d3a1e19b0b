"""Putting products of few bits in the place of a function's layers, and look-ups of its tables."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from ...ir import Function, Weight, arguments, site_of, type_of
from ...ir.ops.numerics import PARTS
from .stored import Form

A, G = torch.ops.aten, torch.ops.graftwork


@dataclass
class LayerProducts:
    """Replaces layers of one function (a copy). rounded: activations are rounded to int8 by row."""

    fn: Function
    rounded: bool
    picked: dict[tuple[torch.fx.Node, bytes], torch.fx.Node] = field(default_factory=dict)
    """Columns that are picked already, of what, so that layers which read the same share them."""

    def replace(
        self, node: torch.fx.Node, weight: str, form: Form, parts: Mapping[str, Weight]
    ) -> None:
        """A layer, or a look-up, by what is stored of its weight; `parts` by their names."""
        with self.fn.graph.inserting_before(node):
            if node.target is A.embedding.default:
                new = self._look_up(node, weight, form, parts)
            else:
                new = self._layer(node, weight, form, parts)
        node.replace_all_uses_with(new)
        self.fn.graph.erase_node(node)

    def _look_up(
        self, node: torch.fx.Node, weight: str, form: Form, parts: Mapping[str, Weight]
    ) -> Any:
        (numeric,) = form.numerics
        given = {p: self.fn.weight(parts[n]) for p, n in form.term_names(weight, 0).items()}
        operands = [given.get(part) for part in PARTS]
        options: dict[str, Any] = {"bits": numeric.bits, "group": numeric.group}
        op, site = G.quantized_embedding.default, site_of(node)
        new = self.fn.call(op, node.args[1], *_cut(operands), site=site, **options)
        if type_of(new) == type_of(node):
            return new
        return self.fn.call(A._to_copy.default, new, dtype=type_of(node).dtype)  # tables: float32

    def _layer(
        self, node: torch.fx.Node, weight: str, form: Form, parts: Mapping[str, Weight]
    ) -> Any:
        bias, site = arguments(node)["bias"], site_of(node)
        held = None if form.reordered else bias
        total: Any = None
        for term, numeric in enumerate(form.numerics):
            names = form.term_names(weight, term)
            x = node.args[0]
            if "columns" in names:
                x = self._picked(x, parts[names["columns"]], site)
            known = {p: self.fn.weight(parts[n]) for p, n in names.items() if p != "columns"}
            operands = [known.get(part) for part in PARTS]
            options: dict[str, Any] = {"bits": numeric.bits, "group": numeric.group}
            options |= {} if self.rounded else {"rounded": False}
            given = _cut([*operands, held if total is None else None])
            new = self.fn.call(G.quantized_linear.default, x, *given, site=site, **options)
            total = new if total is None else self.fn.call(A.add.Tensor, total, new, site=site)
        if not form.reordered:
            return total
        order = self.fn.weight(parts[f"{weight}.outputs"])
        total = self.fn.call(A.index_select.default, total, -1, order, site=site)
        return total if bias is None else self.fn.call(A.add.Tensor, total, bias, site=site)

    def _picked(self, x: Any, columns: Weight, site: Any) -> torch.fx.Node:
        key = x, hashlib.sha256(columns.load().numpy().tobytes()).digest()
        if key not in self.picked:
            index = self.fn.weight(columns)
            self.picked[key] = self.fn.call(A.index_select.default, x, -1, index, site=site)
        return self.picked[key]


def _cut(operands: list[Any]) -> list[Any]:
    """Operands without absent ones at the end."""
    while operands and operands[-1] is None:
        operands.pop()
    return operands
