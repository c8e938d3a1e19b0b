"""Replaces calls that have no row by what they mean, in ops that have one.

The meaning is traced once for each op and argument types: a graftwork op's torch code, an ATen op's
own decomposition. Sizes stay symbolic.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

import torch
import torch.fx
from torch._decomp import decomposition_table
from torch.fx.node import map_aggregate

from ...ir import Function, UnsupportedError, site_of
from ...ir.infer import _freeze, _shapes, _thaw, forget_guesses
from ...ir.ops import op_of
from ...ir.threads import traces
from .emit import row_of, targets_with_rows

_DEPTH = 8  # meanings within meanings; a loop would never end otherwise


def decompose(function: Function, native: bool = False) -> int:
    """Replace calls without a row, in place. Returns how many were replaced.

    native: graftwork's own ops may be among the rows, see `emit`.
    Errors: `UnsupportedError` naming an op that has neither a row nor a decomposition.
    """
    count = 0
    for _ in range(_DEPTH):
        calls = (n for n in function.calls() if n.target is not operator.getitem)
        todo = [node for node in calls if not row_of(node, native)]
        if not todo:
            return count
        for node in todo:
            _replace(function, node)
        count += len(todo)
    raise UnsupportedError(f"onnxruntime: {todo[0].target} decomposes into itself")


def _replace(function: Function, node: torch.fx.Node) -> None:
    template = _template(node.target, _freeze(node.args), _freeze(dict(node.kwargs)))
    leaves = _tensors(node)
    values: dict[torch.fx.Node, Any] = {}
    waiting = iter(leaves)
    result: Any = None
    with function.graph.inserting_before(node):
        for step in template.nodes:
            if step.op == "placeholder":
                values[step] = next(waiting, None)
            elif step.op == "output":
                result = map_aggregate(step.args[0], lambda a: _argument(a, values))
            elif "size" not in step.meta:
                args = map_aggregate(step.args, lambda a: _argument(a, values))
                kwargs = map_aggregate(step.kwargs, lambda a: _argument(a, values))
                values[step] = function.call(
                    step.target, *args, site=site_of(node), granted=True, **kwargs
                )
    _rewire(function, node, result)


def _argument(arg: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if not isinstance(arg, torch.fx.Node):
        return arg
    return arg.meta["size"] if "size" in arg.meta else values[arg]


def _rewire(function: Function, node: torch.fx.Node, result: Any) -> None:
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            function.graph.erase_node(user)
    function.graph.erase_node(node)


def _tensors(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node's tensor arguments in order, repeats included."""
    found: list[torch.fx.Node] = []
    map_aggregate(
        (node.args, dict(node.kwargs)),
        lambda a: found.append(a) if isinstance(a, torch.fx.Node) else None,
    )
    return found


@lru_cache(maxsize=4096)
@traces
def _template(target: Any, args: Any, kwargs: Any) -> torch.fx.Graph:
    """The decomposition as a graph of tensor placeholders; size nodes carry ``meta["size"]``.

    Sizes are compared as the op asks for them (C >= rows in `keep_top`): granted to its steps, and
    to nothing else.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = _shapes()
    known = len(shapes.env.guards)
    definition = op_of(target)
    call = definition.meaning if definition is not None else target
    with shapes.mode, torch.no_grad():
        everything = (_thaw(args, shapes), _thaw(kwargs, shapes))
        fakes: list[torch.Tensor] = []
        _visit(everything, fakes, torch.Tensor)

        # Tracing knows sizes by the tensors that have them; these stand behind the real arguments.
        carriers = [torch.empty(size) for size in _sizes(everything)]

        def flat(*tensors: torch.Tensor) -> Any:
            waiting = iter(tensors)
            positional, named = _substitute(everything, waiting)
            return call(*positional, **named)

        table = None if definition is not None else _table()
        try:
            graph = make_fx(flat, decomposition_table=table)(*fakes, *carriers).graph
        except Exception as error:  # tracing raises whatever the code does
            raise UnsupportedError(f"onnxruntime: cannot decompose {target}: {error}") from error
        finally:
            forget_guesses(shapes, known)
    calls = [n for n in graph.nodes if n.op == "call_function"]
    if definition is None and [n.target for n in calls] == [target]:
        raise UnsupportedError(f"onnxruntime has no row for {target}, and torch no decomposition")
    for step in graph.nodes:
        value = step.meta.get("val")
        if step.op == "call_function" and isinstance(value, (int, torch.SymInt)):
            step.meta["size"] = shapes.dim(value)
        step.args = map_aggregate(step.args, lambda a: _size(a, shapes))
        if step.op == "get_attr":
            raise UnsupportedError(f"onnxruntime: the meaning of {target} makes a constant tensor")
    return graph


def _size(arg: Any, shapes: Any) -> Any:
    return shapes.dim(arg) if isinstance(arg, torch.SymInt) else arg


def _sizes(everything: Any) -> list[torch.SymInt]:
    found: list[torch.SymInt] = []
    _visit(everything, found, torch.SymInt)
    return found


def _visit(tree: Any, found: list[Any], kind: type) -> None:
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _visit(item, found, kind)
    elif isinstance(tree, dict):
        for item in tree.values():
            _visit(item, found, kind)


def _substitute(tree: Any, waiting: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return next(waiting)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_substitute(item, waiting) for item in tree)
    if isinstance(tree, dict):
        return {k: _substitute(v, waiting) for k, v in tree.items()}
    return tree


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    """torch's decompositions of what has no row; those into prims, which are no ATen, left out."""
    kept = targets_with_rows()
    found = {op: how for op, how in decomposition_table.items() if op not in kept}
    return {op: how for op, how in found.items() if not how.__module__.startswith("torch._refs")}
