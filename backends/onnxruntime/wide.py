"""Computes in float32 what a device has no bfloat16 kernel for.

Before, on CUDA, where no session opens over such a node::

    %y: bf16 = ReduceMax(%x: bf16)

After::

    %y: bf16 = Cast(ReduceMax(Cast(%x)))

A value of an integer type is as it was: the best of logits in bfloat16 is the best in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as oir

from .emit import DTYPES

BF16, F32 = oir.DataType.BFLOAT16, oir.DataType.FLOAT

NARROW = frozenset(
    {
        *("ArgMax", "ArgMin", "Ceil", "Clip", "Cos", "CumSum", "Einsum", "Elu", "Equal", "Floor"),
        *("Greater", "GreaterOrEqual", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax"),
        *("NonZero", "OneHot", "Pad", "Range", "Reciprocal", "ReduceL1", "ReduceL2"),
        *("ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"),
        *("ReduceSumSquare", "Round", "Selu", "Sin", "Softplus", "TopK"),
    }
)
"""ONNX's own ops for which the CUDA provider has kernels, but none for bfloat16 (ONNX Runtime's
docs/OperatorKernels.md, read for 1.31)."""


def widen(graph: oir.Graph, ops: frozenset[str] = NARROW) -> int:
    """Put casts around the nodes of ONNX's own `ops` that take or give bfloat16; how many there
    were."""
    types = Types(graph)
    count = 0
    for node in list(graph):
        outputs = types.of_outputs(node)
        narrow = [place for place, value in enumerate(node.inputs) if types.of(value) == BF16]
        if node.domain or node.op_type not in ops or not (narrow or BF16 in outputs):
            continue
        for place in narrow:
            _cast_input(node, place)
        for value, dtype in zip(node.outputs, outputs, strict=True):
            if dtype == BF16:
                _cast_output(graph, node, value)
        count += 1
    return count


def _cast_input(node: oir.Node, place: int) -> None:
    given = node.inputs[place]
    cast = oir.node("Cast", [given], {"to": int(F32)}, name=f"{node.name}.wide.{place}")
    cast.outputs[0].name, cast.outputs[0].dtype = f"{cast.name}.0", F32
    node.prepend(cast)
    node.replace_input_with(place, cast.outputs[0])


def _cast_output(graph: oir.Graph, node: oir.Node, value: oir.Value) -> None:
    """What the node gave is now a wide value, and whoever used it uses that in bfloat16."""
    cast = oir.node("Cast", [value], {"to": int(BF16)}, name=f"{value.name}.narrow")
    new = cast.outputs[0]
    new.dtype, new.shape = BF16, value.shape
    new.meta.update(value.meta)
    for user, place in list(value.uses()):
        if user is not cast:
            user.replace_input_with(place, new)
    node.append(cast)
    for place, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[place] = new
    new.name, value.name = value.name, f"{value.name}.wide"
    value.dtype = F32


class Types:
    """Element types of a graph's values, those that nobody noted worked out from ONNX's schemas."""

    def __init__(self, graph: oir.Graph) -> None:
        self.opset = graph.opset_imports[""]
        self.found: dict[oir.Value, oir.DataType] = {}

    def of(self, value: oir.Value | None) -> oir.DataType | None:
        """The element type of a value whose producer was asked about before."""
        if value is None:
            return None
        return value.dtype or self.found.get(value)

    def of_outputs(self, node: oir.Node) -> list[oir.DataType | None]:
        """The element types of what a node gives."""
        bound = self._bound(node)
        for place, value in enumerate(node.outputs):
            dtype = value.dtype or _noted(value) or bound.get(place)
            if dtype is not None:
                self.found[value] = dtype
        return [self.of(value) for value in node.outputs]

    def _bound(self, node: oir.Node) -> dict[int, oir.DataType]:
        """By output, what the schema says, given the types of the inputs."""
        if "to" in node.attributes:
            return {0: oir.DataType(node.attributes["to"].as_int())}
        if node.domain or not onnx.defs.has(node.op_type, self.opset):
            # Kernels of ONNX Runtime give what they take.
            first = self.of(node.inputs[0])
            return {} if first is None else dict.fromkeys(range(len(node.outputs)), first)
        schema = onnx.defs.get_schema(node.op_type, self.opset, "")
        formals = _stretched(schema.inputs, node.inputs)
        given = zip(formals, map(self.of, node.inputs), strict=True)
        known = {formal.type_str: dtype for formal, dtype in given if dtype is not None}
        allowed = {c.type_param_str: list(c.allowed_type_strs) for c in schema.type_constraints}
        found = {}
        for place, formal in enumerate(_stretched(schema.outputs, node.outputs)):
            only = allowed.get(formal.type_str, [formal.type_str])
            dtype = _PLAIN.get(only[0]) if len(only) == 1 else known.get(formal.type_str)
            if dtype is not None:
                found[place] = dtype
        return found


_PLAIN = {"tensor(int64)": oir.DataType.INT64, "tensor(bool)": oir.DataType.BOOL}
"""Types that are the only ones of some results."""


def _noted(value: oir.Value) -> oir.DataType | None:
    noted = value.meta.get("type")
    return None if noted is None else DTYPES[noted.dtype]


def _stretched(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter], actual: Sequence[oir.Value | None]
) -> list[onnx.defs.OpSchema.FormalParameter]:
    """Formal parameters for so many actual ones: the last one may stand for many."""
    wanted = len(actual)
    return [*formals, *list(formals[-1:]) * wanted][:wanted]
