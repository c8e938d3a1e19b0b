"""Products with weights of few bits, as the native kernels want them.

Before::

    %y: f32[B,T,N] = graftwork.quantized_linear(%x, @w.q4, @w.q4.scale, @w.q4.offset, bits=4,
      group=32)

After::

    %y: f32[B,T,N] = graftwork_native.quantized_linear(%x, @w.q4.tiles.32, @w.q4.scale.columns,
      @w.q4.offset.columns, None, None, 4, 32, 96)

Weights are laid out once for a program, before anything is compiled and in place of what is stored,
so that each is in memory once whatever functions, outputs and widths are compiled. What kernels do
not take stays: products of activations that are not rounded, and weights that a program computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, WeightStore, arguments, site_of, type_of
from ...passes.engine.functions import edit_with_weights
from ...passes.fusing.dce import sweep
from .. import tiles
from . import native_quantized

A, G = torch.ops.aten, torch.ops.graftwork
STORED = ("weight", "scale", "offset", "codebook")


def with_tiles(program: Program) -> Program:
    """The program with its rounded products of few bits as calls of kernels.

    Errors: `InputError` for sizes that kernels do not take, and when weights are loaded, for a
    codebook that is not of whole numbers.
    """
    return edit_with_weights(program, _lay_out).program


def _lay_out(fn: Function, weights: WeightStore) -> tuple[int, WeightStore]:
    count = 0
    for node in fn.calls(G.quantized_linear.default):
        given = arguments(node)
        stored = [given[name] for name in STORED]
        if not given["rounded"] or any(p is not None and p.op != "get_attr" for p in stored):
            continue
        parts: list[Any] = [p and weights[str(p.target)] for p in stored]
        laid = tiles.tiled(*parts, bits=given["bits"], group=given["group"])
        known = [part and weights.taken(part) for part in laid.parts]
        weights = weights.adding(*filter(None, known))
        with fn.graph.inserting_before(node):
            operands = [part and fn.weight(part) for part in known]
            sizes = laid.bits, laid.group, laid.outputs
            _replace(fn, node, operands, given["bias"], sizes)
        count += 1
    sweep(fn)
    return count, weights


def _replace(
    fn: Function, node: torch.fx.Node, operands: list[Any], bias: Any, sizes: tuple[int, ...]
) -> None:
    """The call of the kernel, which is one of float32."""
    site = site_of(node)

    def wide(value: Any) -> Any:
        if value is None or type_of(value).dtype == torch.float32:
            return value
        return fn.call(A._to_copy.default, value, dtype=torch.float32, site=site)

    given = wide(node.args[0]), *operands, wide(bias), *sizes
    new = fn.call(native_quantized.LINEAR, *given, site=site)
    dtype = type_of(node).dtype
    if dtype != torch.float32:
        new = fn.call(A._to_copy.default, new, dtype=dtype, site=site)
    node.replace_all_uses_with(new)
    fn.graph.erase_node(node)
