"""Products and look-ups of weights of few bits: whose weights, and what stands for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from ...ir import Function, Program, Weight, WeightStore, arguments, site_of, type_of
from ...ir.ops.quantized import rounding
from ..engine.functions import token_look_ups
from ..engine.reopening import Wants, names_of
from ..fusing.products import product_of, source_product
from .stored import Form

if TYPE_CHECKING:  # of the pass, whose options are read
    from .quantize_weights import QuantizeWeights

A, G = torch.ops.aten, torch.ops.graftwork


def vocabulary(program: Program) -> frozenset[str]:
    """Names of the tables that tokens are looked up in, and of the head's weight."""
    functions = program.functions.values()
    tables = {weight_name(node) for fn in functions for node in token_look_ups(fn)}
    head = source_product(program.step.outputs.get("logits"))
    return frozenset(tables | {weight_name(head)} if product_of(head) else tables)


def weight_name(node: torch.fx.Node) -> str:
    """The name of the weight that a product multiplies with, or a look-up looks up; or ""."""
    source = node.args[0 if node.target is A.embedding.default else 1]
    known = isinstance(source, torch.fx.Node) and source.op == "get_attr"
    return str(source.target) if known else ""  # type: ignore[union-attr]


def float_weight(node: torch.fx.Node, weights: WeightStore) -> Weight | None:
    """The same as a weight, if that is a float one [N,K]."""
    name = weight_name(node)
    type = weights[name].type if name else None
    plain = type is not None and type.dtype.is_floating_point and len(type.dims) == 2
    return weights[name] if plain else None


def source_weights(pass_: QuantizeWeights, program: Program, *, anew: bool = False) -> Wants:
    """Which weights that the source holds in few bits the pass takes. anew: all of them as floats;
    if not, those that are stored as the pass would store them, or closer to their floats, stay."""
    tables = vocabulary(program)

    def wants(fn: Function, call: torch.fx.Node, floats: tuple[Weight, ...]) -> str:
        known = not tables.isdisjoint(names_of(call))
        if (known and pass_.embedding is False) or not all(map(pass_.names, floats)):
            return ""
        return "stays" if not anew and _as_stored(pass_, call, floats, known) else "floats"

    return wants


def _as_stored(
    pass_: QuantizeWeights, call: torch.fx.Node, floats: tuple[Weight, ...], known: bool
) -> bool:
    """Whether a call's weights have the bits that the pass would give them, in groups as fine."""
    given = arguments(call)
    if given.get("codebook") is not None:
        return False
    groups = [given[name] for name in ("group", "down_group") if name in given]
    for weight, group in zip(floats, groups, strict=True):
        numeric = pass_.numeric_of(weight, known)
        plain = known or len(weight.type.dims) > 2 or pass_.form_of(weight) == Form((numeric,))
        if not plain or numeric.bits != given["bits"] or numeric.group % group:
            return False
    return True


@dataclass
class LayerProducts:
    """Replaces layers of one function (a copy). rounded, span: how activations are rounded, see
    `rounding`."""

    fn: Function
    rounded: bool
    span: int
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
        self.fn.replace(node, new)

    def _look_up(
        self, node: torch.fx.Node, weight: str, form: Form, parts: Mapping[str, Weight]
    ) -> Any:
        (numeric,) = form.numerics
        given: dict[str, Any] = {"bits": numeric.bits, "group": numeric.group}
        given |= {p: self.fn.weight(parts[n]) for p, n in form.term_names(weight, 0).items()}
        op, site = G.quantized_embedding.default, site_of(node)
        new = self.fn.call(op, node.args[1], site=site, **given)
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
            given: dict[str, Any] = {"bits": numeric.bits, "group": numeric.group}
            columns = parts[names["scale"]].type.shape[-1] * numeric.group
            given |= rounding(self.rounded, self.span, (columns, numeric.group))
            given |= {p: self.fn.weight(parts[n]) for p, n in names.items() if p != "columns"}
            given["bias"] = held if total is None else None
            new = self.fn.call(G.quantized_linear.default, x, site=site, **given)
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
