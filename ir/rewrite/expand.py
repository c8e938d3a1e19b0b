"""Decomposition of calls: a graftwork op's meaning, which may call other graftwork ops, or torch's
decomposition of another op.

Decompositions are traced once for each op and argument types, with symbolic sizes. `inline` traces
any function of tensors in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..function import Function, site_of
from ..inference.infer import _freeze, _shapes, _thaw, forget_guesses
from ..ops import op_of
from ..ops.stages import is_core, to_core
from ..support.errors import InputError, UnsupportedError
from ..support.threads import traces

Table = Callable[[], Mapping[Any, Callable[..., Any]]]
"""Decompositions of ops that are not graftwork's."""


def expand(function: Function, node: torch.fx.Node, table: Table | None = None) -> None:
    """Replace a call by its decomposition, in place, one level deep. table: for ops that are not
    graftwork's. Errors: `UnsupportedError` for an op without one, or if it cannot be traced."""
    template = _template(node.target, _freeze(node.args), _freeze(dict(node.kwargs)), table)

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = function.call(target, *args, site=site_of(node), granted=True, **kwargs)
        made.meta["origin"] = origin_of(node) or short_name(node)
        return made

    with function.graph.inserting_before(node):
        result = _placed(template, _tensors((node.args, dict(node.kwargs))), call)
    _rewire(function, node, result)


def inline(function: Function, meaning: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Insert the ops of a function of tensors at the insertion point; returns its result as nodes.

    args, kwargs: of `meaning`, with nodes in the place of tensors. Graftwork ops that it calls stay
    whole; others that no program may hold are decomposed by torch's table. Errors: `InputError`
    that it raises; `UnsupportedError` if it cannot be traced, its trace is valid for one size only,
    or it calls an op that torch does not decompose.
    """
    template = _template(meaning, _freeze(args), _freeze(kwargs), to_core)
    calls = [step.target for step in template.nodes if "size" not in step.meta]
    torchs = [
        target for target in calls if getattr(target, "namespace", "graftwork") != "graftwork"
    ]
    if strange := [target for target in torchs if not is_core(target)]:
        raise UnsupportedError(
            f"{meaning.__name__} calls {strange[0]}, which is not core ATen and which torch does "
            f"not decompose: use core ATen ops, or write an op (ir/ops)"
        )

    def call(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if op_of(target) is not None:  # tracing omits options that have their default
            options = [a for a in target._schema.arguments if a.kwarg_only]
            filled = {a.name: kwargs.get(a.name, a.default_value) for a in options}
            kwargs = {name: value for name, value in filled.items() if value is not None}
        return function.call(target, *args, **kwargs)

    return _placed(template, _tensors((args, kwargs)), call)


def _placed(
    template: torch.fx.Graph, leaves: list[torch.fx.Node], call: Callable[..., torch.fx.Node]
) -> Any:
    """The result of a template's calls, made by `call`. leaves: its tensors, in order."""
    values: dict[torch.fx.Node, Any] = {}
    waiting, result = iter(leaves), None
    for step in template.nodes:
        if step.op == "placeholder":
            values[step] = next(waiting, None)
        elif step.op == "output":
            result = map_aggregate(step.args[0], lambda a: _argument(a, values))
        elif "size" not in step.meta:
            args = map_aggregate(step.args, lambda a: _argument(a, values))
            kwargs = map_aggregate(step.kwargs, lambda a: _argument(a, values))
            values[step] = call(step.target, *args, **kwargs)
    return result


def origin_of(node: torch.fx.Node) -> str:
    """Short name of the op that a call was decomposed from; "" if none."""
    return str(node.meta.get("origin", ""))


def short_name(node: torch.fx.Node) -> str:
    """The name of a call's op, without namespace and overload."""
    return str(node.target.name()).partition("::")[2].partition(".")[0]  # type: ignore[union-attr]


def _argument(arg: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if not isinstance(arg, torch.fx.Node):
        return arg
    return arg.meta["size"] if "size" in arg.meta else values[arg]


def _rewire(function: Function, node: torch.fx.Node, result: Any) -> None:
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            function.replace(user, result[user.args[1]])
    function.graph.erase_node(node)


def _tensors(given: Any) -> list[torch.fx.Node]:
    """The nodes among a call's arguments in order, repeats included."""
    found: list[torch.fx.Node] = []
    map_aggregate(given, lambda a: found.append(a) if isinstance(a, torch.fx.Node) else None)
    return found


@lru_cache(maxsize=4096)
@traces
def _template(target: Any, args: Any, kwargs: Any, table: Table | None) -> torch.fx.Graph:
    """The decomposition as a graph of tensor placeholders; size nodes carry ``meta["size"]``.

    Comparisons of sizes that the op requires (C >= rows in `keep_top`) are granted to its calls.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = _shapes()
    known = len(shapes.env.guards)
    definition = op_of(target)
    call = definition.meaning if definition is not None else target
    with shapes.active():
        leaves, spec = tree_flatten((_thaw(args, shapes), _thaw(kwargs, shapes)))
        fakes = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Tracing finds symbolic sizes in the shapes of tensors: one more for each size argument.
        carriers = [torch.empty(leaf) for leaf in leaves if isinstance(leaf, torch.SymInt)]

        def flat(*tensors: torch.Tensor) -> Any:
            waiting = iter(tensors)
            given = [next(waiting) if isinstance(x, torch.Tensor) else x for x in leaves]
            positional, named = tree_unflatten(given, spec)
            return call(*positional, **named)

        known_ones = None if definition is not None or table is None else table()
        try:
            graph = make_fx(flat, decomposition_table=known_ones)(*fakes, *carriers).graph
            fixed = shapes.fixed()
        except Exception as error:  # tracing raises whatever the code does
            if definition is None and isinstance(error, InputError):
                raise
            raise UnsupportedError(f"cannot decompose {target}: {error}") from error
        finally:
            forget_guesses(shapes, known)
    if fixed := fixed or _hints_in(graph, leaves, shapes):
        raise UnsupportedError(
            f"what {target} means was traced for one size only: it would hold only where {fixed}"
        )
    calls = [n for n in graph.nodes if n.op == "call_function"]
    if definition is None and [n.target for n in calls] == [target]:
        raise UnsupportedError(f"{target} has no row here, and torch no decomposition of it")
    for step in graph.nodes:
        value = step.meta.get("val")
        if step.op == "call_function" and isinstance(value, (int, torch.SymInt)):
            step.meta["size"] = shapes.dim(value)
        step.args = map_aggregate(step.args, lambda a: _size(a, shapes))
        if step.op == "get_attr":
            raise UnsupportedError(f"the meaning of {target} makes a constant tensor")
    return graph


def _hints_in(graph: torch.fx.Graph, given: list[Any], shapes: Any) -> str:
    """Hints of symbols that are constants of the graph but not in the arguments given, as text: see
    `_Shapes.fixed`."""
    own = {*_integers([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in given])}
    found = {*_integers([(step.args, dict(step.kwargs)) for step in graph.nodes])}
    strange = sorted(found & set(shapes.hints) - own)
    return " and ".join(f"{shapes.hints[number]} = {number}" for number in strange)


def _size(arg: Any, shapes: Any) -> Any:
    return shapes.dim(arg) if isinstance(arg, torch.SymInt) else arg


def _integers(tree: Any) -> list[int]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, int)]
