"""Products with, and look-ups in, weights of few bits, as the native kernels want them.

Before::

    %h: f32[B,T,K] = graftwork.quantized_embedding(%ids, @w.q4, @w.q4.scale, bits=4, group=32)
    %y: f32[B,T,N] = graftwork.quantized_linear(%h, @w.q4, @w.q4.scale, bits=4, group=32)

After::

    %h: f32[B,T,K] = graftwork_native.quantized_embedding(%ids, @w.q4.tiles.4.32,
      @w.q4.scale.columns, None, None, 4, 32, 96)
    %y: f32[B,T,N] = graftwork_native.quantized_linear(%h, @w.q4.tiles.4.32,
      @w.q4.scale.columns, None, None, None, 4, 32, 96)

Products of activations that are not rounded become calls of `float_linear` in the same way, of the
same tiles. Weights are laid out once for a program, before anything is compiled and in place of
what is stored, so that each is in memory once whatever functions, outputs and widths are compiled,
a table that is a head's weight, too. What kernels do not take stays: weights that a program
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, Weight, WeightStore, arguments, site_of, type_of
from ...ir.execution.executable import KernelUse
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.expand import expand
from ...ir.rewrite.stored import are_weights, parts_of, stored_in
from .. import tiles
from ..kernel_uses import decomposed, uses
from . import native_quantized

A, G = torch.ops.aten, torch.ops.graftwork
NATIVE = {
    native_quantized.LINEAR: "product",
    native_quantized.FLOAT_LINEAR: "product",
    native_quantized.EMBEDDING: "look-up",
    native_quantized.EXPERTS: "experts",
}
"""What kernels of few bits do."""


def with_tiles(program: Program) -> Program:
    """The program with its products of few bits, and its look-ups, as calls of kernels.

    Errors: `InputError` for sizes that kernels do not take, and when weights are loaded, for a
    codebook that is not of whole numbers.
    """
    functions, weights = dict[str, Function](), program.weights
    for name, function in program.functions.items():
        fn = function.copy()
        count, weights = _lay_out(fn, weights)
        functions[name] = fn if count else function
    if functions == program.functions:
        return program
    return program.replace(functions=functions, weights=weights).pruned()


def kernels_of(program: Program) -> tuple[KernelUse, ...]:
    """What runs the products and look-ups of few bits of a program, laid out or not."""
    found: list[KernelUse] = []
    for fn in program.functions.values():
        native = any(fn.calls(*NATIVE))
        found += uses(fn, NATIVE, tiles.kernel_name()) if native else ()
        found += decomposed(fn)
    return tuple(found)


def _lay_out(fn: Function, weights: WeightStore) -> tuple[int, WeightStore]:
    count, weights = _lay_out_experts(fn, weights)
    for node in fn.calls(G.quantized_linear.default, G.quantized_embedding.default):
        given = arguments(node)
        if not are_weights(node):
            continue
        looks_up = node.target is G.quantized_embedding.default
        rounded = not looks_up and given["rounded"]
        lay_out = tiles.tiled if rounded else tiles.tiled_table
        parts: list[Any] = [p and weights[str(p.target)] for p in parts_of(node).values()]
        laid = lay_out(*parts, bits=given["bits"], group=given["group"])
        known = [part and weights.taken(part) for part in laid.parts]
        weights = weights.adding(*filter(None, known))
        kernel = native_quantized.LINEAR if rounded else native_quantized.FLOAT_LINEAR
        read, bias = (node.args[0], torch.float32), [(given.get("bias"), torch.float32)]
        sizes = [laid.bits, laid.group, laid.outputs]
        if looks_up:
            kernel, read, bias = native_quantized.EMBEDDING, (node.args[0], torch.int64), []
        elif rounded:
            sizes.append(given["span"])
        _call(fn, node, kernel, [read], known, bias, sizes)
        count += 1
    sweep(fn)
    return count, weights


def _lay_out_experts(fn: Function, weights: WeightStore) -> tuple[int, WeightStore]:
    """Mixtures of experts as their products, and those as calls of kernels, where the outputs of an
    expert are whole tiles."""
    mixtures = [n for n in fn.calls(G.quantized_moe.default) if _are_whole_tiles(n)]
    for node in mixtures:
        expand(fn, node)
    for node in fn.calls(G.quantized_experts.default):
        given = arguments(node)
        weight, scale, offset, _ = parts_of(node).values()  # experts have no codebooks
        parts: list[Any] = [p and weights[str(p.target)] for p in (weight, scale, offset)]
        laid = tiles.tiled_experts(*parts, bits=given["bits"], group=given["group"])
        known = [part and weights.taken(part) for part in laid.parts[:3]]
        weights = weights.adding(*filter(None, known))
        read = [(given["x"], torch.float32), (given["experts"], torch.int64)]
        bias, sizes = [(given["bias"], torch.float32)], (laid.bits, laid.group, laid.outputs)
        rounding = given["rounded"], given["span"]
        kernel = native_quantized.EXPERTS
        _call(fn, node, kernel, read, known, bias, (*sizes, *rounding))
    return len(mixtures), weights


def _are_whole_tiles(node: torch.fx.Node) -> bool:
    stacks = [arguments(node)[name] for name in stored_in(node)]
    return are_weights(node) and all(
        tiles.whole_tiles(int(str(type_of(p).dims[1]))) for p in stacks
    )


def _call(
    fn: Function,
    node: torch.fx.Node,
    kernel: Any,
    read: Sequence[tuple[Any, torch.dtype]],
    laid: Sequence[Weight | None],
    bias: Sequence[tuple[Any, torch.dtype]],
    sizes: Sequence[int],
) -> None:
    """Put the call of a kernel in a node's place. read, bias: values before and behind the weight's
    parts, and the dtypes in which kernels take them."""
    with fn.graph.inserting_before(node):
        parts = [part and fn.weight(part) for part in laid]
        before, behind = (
            [_in_dtype(fn, node, value, dtype) for value, dtype in some] for some in (read, bias)
        )
        new = fn.call(kernel, *before, *parts, *behind, *sizes, site=site_of(node))
        new = _in_dtype(fn, node, new, type_of(node).dtype)
    node.replace_all_uses_with(new)
    fn.graph.erase_node(node)


def _in_dtype(fn: Function, node: torch.fx.Node, value: Any, dtype: torch.dtype) -> Any:
    if value is None or type_of(value).dtype == dtype:
        return value
    return fn.call(A._to_copy.default, value, dtype=dtype, site=site_of(node))
