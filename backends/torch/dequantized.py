"""Products with weights of few bits whose activations stay float, as float products.

Before::

    %y: f32[B,T,96] = graftwork.quantized_linear(%x, @w.q4, @w.q4.scale, bits=4, group=32,
      rounded=False)

After::

    %y: f32[B,T,96] = aten.linear(%x, @w.q4.values)

That is the op's meaning, with the weight's values worked out once instead of at every step: they
are in memory in its place. No kernel multiplies floats with few bits here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, Weight, WeightStore, arguments, site_of, type_of
from ...passes.engine.functions import edit_with_weights
from ...passes.fusing.dce import sweep
from ...passes.numerics.values import are_constant, values_of

A, G = torch.ops.aten, torch.ops.graftwork


def with_values(program: Program) -> Program:
    """The program with its float products of few bits as products with float32 values."""
    return edit_with_weights(program, _spell_out).program


def _spell_out(fn: Function, weights: WeightStore) -> tuple[int, WeightStore]:
    count = 0
    for node in fn.calls(G.quantized_linear.default):
        if arguments(node)["rounded"] or not are_constant(node):
            continue
        values = weights.taken(values_of(node, weights))
        weights = weights.adding(values)
        with fn.graph.inserting_before(node):
            new = _product(fn, node, values)
        node.replace_all_uses_with(new)
        fn.graph.erase_node(node)
        count += 1
    sweep(fn)
    return count, weights


def _product(fn: Function, node: torch.fx.Node, values: Weight) -> torch.fx.Node:
    given, site = arguments(node), site_of(node)

    def wide(value: Any) -> Any:
        if value is None or type_of(value).dtype == torch.float32:
            return value
        return fn.call(A._to_copy.default, value, dtype=torch.float32, site=site)

    operands = wide(given["x"]), fn.weight(values), wide(given["bias"])
    new = fn.call(A.linear.default, *operands, site=site)
    dtype = type_of(node).dtype
    if dtype == torch.float32:
        return new
    return fn.call(A._to_copy.default, new, dtype=dtype, site=site)
