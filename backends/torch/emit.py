"""From an IR function to a callable `fx.GraphModule`: inline meanings, write states in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ...ir import Function, Sym, TensorType, UnsupportedError, cone, type_of
from ...ir.ops import op_of
from .rows import ROWS, Row, cache_write_

G = torch.ops.graftwork


def emit(
    function: Function,
    weights: Mapping[str, torch.Tensor],
    states: Sequence[str],
    fetch: Sequence[str],
    absent: frozenset[str] = frozenset(),
    rows: Mapping[Any, Row] = ROWS,
    device: torch.device | None = None,
) -> torch.fx.GraphModule:
    """A module that takes the function's inputs in order and returns the `fetch` outputs.

    Inputs called in `absent` must be optional arguments of the ops that use them; they become None
    and are no longer taken. States are updated in place: by the op that writes them where nothing
    else needs what they held, and by a copy at the end otherwise. Symbolic sizes are read off the
    inputs. Ops with an entry in `rows` run as it says, all others as their meaning. device: where
    weights and inputs lie, and so all that ops make (the CPU, unless said): programs know none.
    Errors: `UnsupportedError` naming an op that torch cannot run.
    """
    builder = _Builder(function, weights, frozenset(states), absent, rows, device)
    outputs = function.outputs
    wanted = [outputs[name] for name in fetch]
    return builder.build(wanted, {name: outputs[name] for name in states if name in outputs})


class _Builder:
    def __init__(
        self,
        function: Function,
        weights: Mapping[str, torch.Tensor],
        states: frozenset[str],
        absent: frozenset[str],
        rows: Mapping[Any, Row],
        device: torch.device | None,
    ) -> None:
        self.function, self.states, self.absent = function, states, absent
        self.weights, self.rows, self.device = weights, rows, device or torch.device("cpu")
        self.graph = torch.fx.Graph()
        self.values: dict[torch.fx.Node, Any] = {}
        self.sizes: dict[str, torch.fx.Node] = {}
        self.attributes: dict[str, torch.Tensor] = {}
        self.in_place: set[torch.fx.Node] = set()

    def build(
        self, wanted: list[torch.fx.Node], written: Mapping[str, torch.fx.Node]
    ) -> torch.fx.GraphModule:
        """Emit what the wanted outputs and the state updates need, and nothing else."""
        needed = cone([*wanted, *written.values()])
        owned = {name for name, node in written.items() if self._owns_state(name, node)}
        self.in_place = {written[name] for name in owned}
        for node in self.function.inputs:
            self._input(node)
        for node in self.function:
            if node in needed and node.op != "placeholder":
                self.values[node] = self._emit(node)
        copied = {name: node for name, node in written.items() if name not in owned}
        self.graph.output(self._copy(copied, wanted))
        self.graph.lint()
        return torch.fx.GraphModule(self.attributes, self.graph)

    def _input(self, node: torch.fx.Node) -> None:
        name = str(node.target)
        if name in self.absent:
            self.values[node] = None
            return
        # Numbered: fx writes code with these names, where an input called self would be another's.
        given = self.values[node] = self.graph.placeholder(f"input_{len(self.values)}")
        given.meta["type"] = type_of(node)
        for axis, dim in enumerate(type_of(node).dims):
            if isinstance(dim, Sym) and dim.plain and dim.text not in self.sizes:
                size = torch.ops.aten.sym_size.int
                self.sizes[dim.text] = self.graph.call_function(size, (given, axis))

    def _emit(self, node: torch.fx.Node) -> torch.fx.Node:
        if node.op == "get_attr":
            return self._constant(self.weights[str(node.target)])
        if node.target is G.hidden.default:  # a marker costs nothing
            marked: torch.fx.Node = self.values[node.all_input_nodes[0]]
            return marked
        args = map_aggregate(node.args, self._value)
        kwargs = map_aggregate(node.kwargs, self._value)
        placed = self._placed(node.target, args, kwargs)
        emitted = self.graph.call_function(self._how(node), *placed)
        emitted.meta["type"] = node.meta["type"]
        return emitted

    def _placed(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Arguments with the device where what an op makes belongs, if the op asks for one."""
        schema = getattr(target, "_schema", None)
        named = [] if schema is None else [argument.name for argument in schema.arguments]
        if "device" not in named:
            return args, kwargs
        place = named.index("device")
        if place < len(args):
            return (*args[:place], self.device, *args[place + 1 :]), kwargs
        return args, {**kwargs, "device": self.device}

    def _constant(self, value: torch.Tensor) -> torch.fx.Node:
        key = f"w{len(self.attributes)}"
        self.attributes[key] = value
        constant = self.graph.get_attr(key)
        constant.meta["type"] = TensorType.of(value)
        return constant

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.values[arg]
        if isinstance(arg, Sym):
            lookup = {name: torch.fx.Proxy(size) for name, size in self.sizes.items()}
            result = arg.evaluate(lookup.__getitem__)
            return result.node if isinstance(result, torch.fx.Proxy) else result
        return arg

    def _copy(
        self, written: Mapping[str, torch.fx.Node], wanted: list[torch.fx.Node]
    ) -> tuple[Any, ...]:
        """Copy values into states, after all that reads the old ones; the wanted values."""
        states = {str(n.target): n for n in self.function.inputs if str(n.target) in self.states}
        changed = {name: node for name, node in written.items() if states.get(name) is not node}
        # What lies in a state's memory is taken out before anything is written over.
        lying = {n for n in [*wanted, *changed.values()] if changed and _source(n) in states}
        clone, copy_ = torch.ops.aten.clone.default, torch.ops.aten.copy_.default
        out = {n: self.graph.call_function(clone, (self.values[n],)) for n in lying}
        for name, node in changed.items():
            value = out.get(node, self.values[node])
            self.graph.call_function(copy_, (self.values[states[name]], value))
        return tuple(out.get(node, self.values[node]) for node in wanted)

    def _how(self, node: torch.fx.Node) -> Any:
        if node in self.in_place:
            return cache_write_
        if node.target in self.rows:
            return self.rows[node.target]
        definition = op_of(node.target)
        if definition is not None:
            return definition.meaning
        if node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload):
            return node.target
        raise UnsupportedError(f"the torch backend has no way to run {node.target}")

    def _owns_state(self, name: str, write: torch.fx.Node) -> bool:
        """Whether a state's new value may be written into the state itself: whoever else reads the
        old rows has done so before, because the new ones follow from what it read."""
        if write.target is not G.cache_write.default:
            return False
        cache: Any = write.args[0]
        if cache.op != "placeholder" or str(cache.target) != name:
            return False
        others = set(cache.users) - {write}
        return not others or others <= cone([write.args[1]])  # type: ignore[list-item]


def _source(node: torch.fx.Node) -> str | None:
    """The input in whose memory a value may lie."""
    while node.op == "call_function":
        returns = [] if node.target is operator.getitem else node.target._schema.returns  # type: ignore
        same = node.target in (operator.getitem, G.hidden.default)
        if not same and all(result.alias_info is None for result in returns):
            return None
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return str(node.target) if node.op == "placeholder" else None
