"""Builds ONNX graphs by hand, and puts emitted functions into them: what loops are made with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as oir
import torch

from ...ir import TensorType, Weight
from .emit import Emitted
from .names import Names, constant_name, name_results
from .store import OWNER

I64, BOOL = oir.DataType.INT64, oir.DataType.BOOL
F32, F64 = oir.DataType.FLOAT, oir.DataType.DOUBLE


class GraphBuilder:
    """A graph, and in it a node after the other. Names begin with the graph's.

    inside: the graph that this one is a body in. Of the outermost: weights, all that were put in,
    and the graph that holds each; copies, how often each function was. part: what the nodes that
    come next are for, which their names say.
    """

    def __init__(
        self, name: str, opsets: Mapping[str, int], inside: GraphBuilder | None = None
    ) -> None:
        self.name, self.opsets, self.inside = name, opsets, inside
        self.graph = oir.Graph([], [], nodes=[], opset_imports=dict(opsets), name=name)
        self.outermost: GraphBuilder = self if inside is None else inside.outermost
        self.weights: dict[str, tuple[oir.Value, Weight]] = {}
        self.holders: dict[str, GraphBuilder] = {}
        self.copies: Counter[str] = Counter()
        self.names, self.part = Names(), ""

    def body(self, name: str) -> GraphBuilder:
        """The builder of a graph inside this one, with the inputs of a Loop's body."""
        made = self.branch(name)
        made.input("iteration", I64, [])
        made.input("going", BOOL, [])
        return made

    def branch(self, name: str) -> GraphBuilder:
        """The builder of a graph inside this one, without inputs: a branch of an If."""
        self.outermost.copies[name] += 1
        number = self.outermost.copies[name]
        return GraphBuilder(name if number == 1 else f"{name}.{number}", self.opsets, self)

    @property
    def around(self) -> list[GraphBuilder]:
        """The graphs that this one is in, the outermost first, and itself."""
        return [*([] if self.inside is None else self.inside.around), self]

    def input(self, name: str, dtype: oir.DataType, dims: Sequence[int | str]) -> oir.Value:
        """An input; that of a body has the body's name before its own."""
        full = name if self.inside is None else f"{self.name}.{name}"
        value = oir.val(full, dtype=dtype, shape=dims)
        self.graph.inputs.append(value)
        return value

    def output(
        self, name: str, value: oir.Value, dtype: oir.DataType, dims: Sequence[int | str] | None
    ) -> None:
        """An output, always the result of a node of this graph: of the value's own, if that can be,
        because what copies a value takes time."""
        node = value.producer()
        own = node is not None and node.graph is self.graph and value not in self.graph.outputs
        made = value if own else self.op("Identity", value)
        made.name = name if self.inside is None else f"{self.name}.{name}"
        made.dtype, made.shape = dtype, None if dims is None else oir.Shape(dims)
        self.graph.outputs.append(made)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Names of nodes that are made inside say what they are for."""
        around = self.part
        self.part = f"{around}/{part}" if around else part
        yield
        self.part = around

    def op(
        self,
        op_type: str,
        *inputs: oir.Value | None,
        outputs: int | None = None,
        called: str = "",
        **attributes: Any,
    ) -> Any:
        """A node of ONNX's own; its value, or a tuple if `outputs` is given. called: what messages
        about it are to say."""
        name = self.names.free("/".join(p for p in (self.name, self.part, called or op_type) if p))
        given = {k: v for k, v in attributes.items() if v is not None}
        node = oir.node(op_type, list(inputs), given, num_outputs=outputs or 1, name=name)
        name_results(node)
        self.graph.append(node)
        return node.outputs[0] if outputs is None else tuple(node.outputs)

    def typed(
        self, op_type: str, dtype: oir.DataType, *inputs: oir.Value | None, **attributes: Any
    ) -> Any:
        """A node of ONNX's own whose value may go out of this graph."""
        made = self.op(op_type, *inputs, **attributes)
        made.dtype = dtype
        return made

    def const(self, data: Any, dtype: type = np.int64) -> oir.Value:
        """A small constant."""
        array: np.ndarray[Any, Any] = np.array(data, dtype=dtype)
        name = constant_name(self.name, torch.from_numpy(array), len(self.graph.initializers))
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        tensor = oir.tensor(array, name=name)
        value = oir.Value(
            name=tensor.name,
            shape=oir.Shape(array.shape),
            type=oir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def checked_lengths(self, ids: oir.Value, lengths: oir.Value) -> Any:
        """The lengths i64[B] of rows of ids i64[B,S]; any that is none of a row is an error that
        says so."""
        width = self.size(ids, 1)
        last = self.op("Sub", lengths, self.const(1))
        # Places count from the end, too, where they are negative.
        outside = self.op("Less", last, self.const(0))
        place = self.op("Where", outside, width, last)
        places = self.range(self.const(0), width)
        found = self.op("Gather", places, place, called="lengths_are_1_to_prompt_length")
        return self.op("Add", found, self.const(1))

    def zeros(self, type: TensorType, sizes: Mapping[str, oir.Value]) -> Any:
        """Zeros of a type, with sizes for its symbols."""
        dims = [self.const(d) if isinstance(d, int) else sizes[str(d)] for d in type.dims]
        dtype = torch.zeros(1, dtype=type.dtype).numpy().dtype
        zero = oir.tensor(np.zeros(1, dtype=dtype))
        return self.op("ConstantOfShape", self.vector(*dims), value=zero)

    # -- what is said often

    def size(self, value: oir.Value, axis: int) -> Any:
        """How long an axis is, i64[]."""
        shape = self.op("Shape", value, start=axis, end=axis + 1)
        return self.op("Squeeze", shape, self.const([0]))

    def vector(self, *values: oir.Value) -> Any:
        """Scalars as a vector."""
        rows = [self.op("Reshape", value, self.const([1])) for value in values]
        return rows[0] if len(rows) == 1 else self.op("Concat", *rows, axis=0)

    def none_of(self, value: oir.Value) -> Any:
        """None of a value's rows. (OpenVINO takes constants without entries for scalars.)"""
        return self.slice(value, None, self.const(0))

    def range(self, start: oir.Value, end: oir.Value) -> Any:
        """The numbers from `start` to before `end`."""
        return self.op("Range", start, end, self.const(1))

    def slice(self, value: oir.Value, start: Any, end: Any, axis: int = 0) -> Any:
        """Part of a value along an axis; bounds are scalars, or None."""
        low = self.const([0]) if start is None else self.vector(start)
        high = self.const([2**62]) if end is None else self.vector(end)
        return self.op("Slice", value, low, high, self.const([axis]))

    def cast(self, value: oir.Value, dtype: oir.DataType) -> Any:
        """The value in another dtype."""
        return self.op("Cast", value, to=int(dtype))

    def total(self, flags: oir.Value, axis: int = -1) -> Any:
        """How many flags are set along an axis."""
        return self.op("ReduceSum", self.cast(flags, I64), self.const([axis]), keepdims=0)

    def leading(self, flags: oir.Value, axis: int = 0) -> Any:
        """How many flags at the front of an axis are set, i64: of draft tokens that equal what the
        target chooses, those that greedy acceptance keeps (`runtime.speculate.sampling.agreed`)."""
        missing = self.op("CumSum", self.cast(self.op("Not", flags), I64), self.const(axis))
        return self.total(self.op("Equal", missing, self.const(0)), axis)

    def flags(self, shape: oir.Value) -> Any:
        """Flags of a shape i64[R], none of them set."""
        none = oir.tensor(np.zeros(1, np.bool_))
        return self.op("ConstantOfShape", shape, value=none)

    def marked(self, flags: oir.Value, places: oir.Value) -> Any:
        """Flags bool[R,V], with those at the places i64[R,N] set."""
        set = self.op("Equal", places, places)
        return self.op("ScatterElements", flags, places, set, axis=1)

    def loop(
        self, body: GraphBuilder, most: oir.Value, going: oir.Value | None, start: Sequence[Any]
    ) -> tuple[Any, ...]:
        """A Loop over a finished body; what it carries at the end, and its scans."""
        count = len(body.graph.outputs) - 1
        what = body.name.partition(".")[2] or body.name
        made: tuple[Any, ...] = self.op(
            "Loop", most, going, *start, outputs=count, called=what, body=body.graph
        )
        return made


def splice(
    builder: GraphBuilder, emitted: Emitted, inputs: Mapping[str, oir.Value]
) -> dict[str, oir.Value]:
    """Put an emitted function's nodes at the end of a graph; its outputs by name.

    Weights become that graph's, each once: kernels pack those of their own graph beforehand, and
    not those of a graph around it. What two graphs use becomes that of the one around both. Small
    constants become the outermost graph's.
    """
    graph, root = emitted.model.graph, builder.outermost
    outputs = {str(value.name): value for value in graph.outputs}
    graph.outputs.clear()
    for value in list(graph.inputs):
        oir.convenience.replace_all_uses_with(value, inputs[str(value.name)])
    for name in list(graph.initializers):
        value = graph.initializers.pop(name)
        kept = root.graph.initializers.get(name, value)  # the same, from another copy
        if kept is value:
            root.graph.register_initializer(value)
        else:
            oir.convenience.replace_all_uses_with(value, kept)
    for value, weight in emitted.pending:
        kept, _ = root.weights.setdefault(weight.name, (value, weight))
        holder = _around_both(root.holders.setdefault(weight.name, builder), builder)
        root.holders[weight.name], kept.meta[OWNER] = holder, holder.graph
        if kept is not value:
            oir.convenience.replace_all_uses_with(value, kept)
    root.copies[str(graph.name)] += 1
    number = root.copies[str(graph.name)]
    prefix = graph.name if number == 1 else f"{graph.name}.{number}"
    nodes = list(graph)
    graph.remove(nodes)
    _prefix_names(nodes, str(prefix))
    builder.graph.extend(nodes)
    return outputs


def _prefix_names(nodes: Sequence[oir.Node], prefix: str) -> None:
    """Put a prefix before the names of nodes and of what they make, bodies' included."""
    for node in nodes:
        node.name = f"{prefix}/{node.name}"
        made = list(node.outputs)
        for attribute in node.attributes.values():
            if attribute.type == oir.AttributeType.GRAPH:
                body = attribute.as_graph()
                body.name = f"{prefix}/{body.name}"
                made += list(body.inputs)
                _prefix_names(list(body), prefix)
        for value in made:
            value.name = f"{prefix}/{value.name}" if value.name else value.name


def _around_both(one: GraphBuilder, other: GraphBuilder) -> GraphBuilder:
    """The innermost graph that holds both, or is one of them."""
    return next(graph for graph in reversed(one.around) if graph in other.around)
