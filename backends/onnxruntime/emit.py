"""From an IR function to an ONNX model: one row of a table per op.

A row is a small function that takes the emitter and the call's arguments in schema order (values
for tensors, plain Python for the rest) and returns the ONNX value(s) of the result. Rows live in
``rows_<family>.py``; `row` enters them into the table. The emitter knows symbolic sizes, constants
and weights; it knows no op.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import onnx_ir as oir
import torch
import torch.fx

from ...ir import (
    NOWHERE,
    Dim,
    Function,
    Site,
    Sym,
    TensorType,
    UnsupportedError,
    Weight,
    WeightStore,
    arguments,
    site_of,
)
from ...ir.types import ValueType
from .calls import source_of
from .names import Names, Places, constant_name, name_results
from .schemas import schema_since

MICROSOFT = "com.microsoft"
OPSETS = {"": 24, MICROSOFT: 1}
OWN = "graftwork"
"""The domain of graftwork's own ops, for which a session needs its library of kernels."""

IR_VERSION = 11

DTYPES: dict[torch.dtype, oir.DataType] = {
    torch.float64: oir.DataType.DOUBLE,
    torch.float32: oir.DataType.FLOAT,
    torch.float16: oir.DataType.FLOAT16,
    torch.bfloat16: oir.DataType.BFLOAT16,
    torch.int64: oir.DataType.INT64,
    torch.int32: oir.DataType.INT32,
    torch.int16: oir.DataType.INT16,
    torch.int8: oir.DataType.INT8,
    torch.uint8: oir.DataType.UINT8,
    torch.bool: oir.DataType.BOOL,
}

Row = Callable[..., Any]
Guard = Callable[[torch.fx.Node], bool]
_ROWS: dict[tuple[Any, bool], tuple[Row | None, Guard | None]] = {}


def row(*targets: Any, when: Guard | None = None, native: bool = False) -> Callable[[Row], Row]:
    """Enter the decorated function into the table for these ops.

    when: the row serves only calls for which this holds; others are decomposed. native: it serves
    only models that may have graftwork's own ops, and goes before a row that serves all of them.
    """

    def enter(function: Row) -> Row:
        for target in targets:
            if (target, native) in _ROWS:
                raise UnsupportedError(f"two rows for {target}")
            _ROWS[target, native] = (function, when)
        return function

    return enter


def native_parts(*targets: Any, when: Guard) -> None:
    """Enter ops that are decomposed where models may have graftwork's own ops, because their parts
    have rows there; when: for which calls. Elsewhere the row that serves all models is taken."""
    for target in targets:
        _ROWS[target, True] = (None, when)


def row_of(node: torch.fx.Node, native: bool = False) -> Row | None:
    """The row that emits a call, or None if it has to be decomposed. native: see `emit`."""
    for kind in (True, False) if native else (False,):
        found, when = _ROWS.get((node.target, kind), (None, _never))
        if when is None or when(node):
            return found
    return None


def _never(node: torch.fx.Node) -> bool:
    return False


def targets_with_rows() -> frozenset[Any]:
    """All ops that have a row (whatever its condition)."""
    return frozenset(target for target, _ in _ROWS)


def output_name(function: Function, name: str) -> str:
    """Name of an output in the ONNX graph: an updated state may not share its input's name."""
    return f"{name}.next" if function.has_input(name) else name


@dataclass(frozen=True)
class Emitted:
    """An ONNX model whose large initializers are not there yet.

    pending: the weight behind each such initializer, and the value that stands for it. ran: how
    often which kernel runs what with weights of so many bits (see `ir.executable.KernelUse`).
    """

    model: oir.Model
    pending: tuple[tuple[oir.Value, Weight], ...]
    ran: tuple[tuple[tuple[str, int, str], int], ...] = ()

    @property
    def has_own_ops(self) -> bool:
        """Whether only sessions with graftwork's own kernels can run it."""
        return OWN in self.model.graph.opset_imports


def emit(function: Function, weights: WeightStore, **how: Any) -> Emitted:
    """Emit a function whose every call has a row. how: see `Emitter`.

    Errors: `UnsupportedError` naming an op without a row and where it comes from, or one that
    needs ONNX Runtime's domain, or a later opset.
    """
    return Emitter(function, weights, **how).run()


@dataclass
class Emitter:
    """One emission. Rows call `op`, `const`, `cast`, `size`, `shape`, `reshape` and `once`.

    paired: attention takes a lone token twice, see `pairs`. standard: of what ONNX has a schema
    for, its own ops, so that its checker and other tools know them. native: graftwork's own kernels
    may run what they are faster at, where `probe` finds that they work. qdq: weights of few bits
    go through DequantizeLinear, which is ONNX's own, not a kernel of ONNX Runtime's domain.
    contrib: ops of that domain may be used at all. opset: the version of ONNX's own ops. threads:
    those that own kernels may share work with. cuda: for sessions of CUDA's provider.
    """

    function: Function
    weights: WeightStore
    paired: bool = False
    standard: bool = False
    native: bool = False
    qdq: bool = False
    contrib: bool = True
    opset: int = OPSETS[""]
    threads: int = 1
    cuda: bool = False
    result: ValueType = ()
    memo: dict[Any, Any] = field(default_factory=dict)
    constants: dict[Any, oir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = {"": self.opset} | ({MICROSOFT: OPSETS[MICROSOFT]} if self.contrib else {})
        self.graph = oir.Graph([], [], nodes=[], opset_imports=used, name=self.function.name)
        self.outermost = self.graph
        self.site = NOWHERE
        self.values: dict[torch.fx.Node, Any] = {}
        self.inputs: dict[str, oir.Value] = {}
        self.pending: dict[str, tuple[oir.Value, Weight]] = {}
        self.ran: Counter[tuple[str, int, str]] = Counter()
        self.names, self.places = Names(), Places()
        self.prefix = ""
        self.looked_up = _looked_up(self.function)

    # -- the walk

    def run(self) -> Emitted:
        """Emit every node in order and close the graph."""
        for node in self.function.inputs:
            if node.users:
                self.values[node] = self._input(node)
        for node in self.function:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self.values[node] = self.weight(self.weights[str(node.target)])
        for name, node in self.function.outputs.items():
            self._output(output_name(self.function, name), node)
        model = oir.Model(self.graph, ir_version=IR_VERSION, producer_name="graftwork")
        return Emitted(model, tuple(self.pending.values()), tuple(self.ran.items()))

    def _input(self, node: torch.fx.Node) -> oir.Value:
        """An input of the graph; those that nothing reads, not even for a size, are left out."""
        name = str(node.target)
        if name not in self.inputs:
            self.inputs[name] = self._typed(name, node.meta["type"])
            self.graph.inputs.append(self.inputs[name])
        return self.inputs[name]

    def _typed(self, name: str, type: TensorType) -> oir.Value:
        dims = [d if isinstance(d, int) else str(d).replace(" ", "") for d in type.dims]
        value = oir.val(name, dtype=DTYPES[type.dtype], shape=dims)
        value.meta["type"] = type
        return value

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            results = self.values[source_of(node)]
            self.places.of(node)
            self.values[node] = self._mark(results[node.args[1]], node.meta["type"])
            return
        function = row_of(node, self.native)
        if function is None:
            raise UnsupportedError(
                f"onnxruntime: no row for {node.target} at %{node.name}"
                f"{_where_at(site_of(node))} and nothing to decompose it with"
            )
        self.result, self.prefix, self.site = node.meta["type"], self.places.of(node), site_of(node)
        self.values[node] = self._mark(function(self, *self._arguments(node)), self.result)

    def _arguments(self, node: torch.fx.Node) -> list[Any]:
        """Arguments in schema order, defaults filled in, nodes replaced by their values."""
        return [torch.fx.node.map_aggregate(a, self._value) for a in arguments(node).values()]

    def _value(self, arg: Any) -> Any:
        return self.values[arg] if isinstance(arg, torch.fx.Node) else arg

    def _mark(self, value: Any, type: ValueType) -> Any:
        if isinstance(value, tuple) and isinstance(type, tuple):
            return tuple(self._mark(v, t) for v, t in zip(value, type, strict=True))
        if value is not None and "type" not in value.meta:
            value.meta["type"] = type
        return value

    def _output(self, name: str, node: torch.fx.Node) -> None:
        value, type = self.values[node], node.meta["type"]
        if value.producer() is None or value in self.graph.outputs:
            value = self.op("Identity", value)
        value.name = name
        value.shape, value.dtype = self._typed(name, type).shape, DTYPES[type.dtype]
        self.graph.outputs.append(value)

    # -- what rows build with

    def op(
        self,
        op_type: str,
        *inputs: oir.Value | None,
        domain: str = "",
        outputs: int | None = None,
        unwanted: Sequence[int] = (),
        **attributes: Any,
    ) -> Any:
        """A new ONNX node; its value, or a tuple of values if `outputs` is given.

        Inputs that are None are left out, attributes that are None keep ONNX's default.
        unwanted: optional outputs to leave out; they would be worked out and take memory.
        """
        trimmed = list(inputs)
        for value in trimmed:
            self._use(value)
        while trimmed and trimmed[-1] is None:
            trimmed.pop()
        given = {k: v for k, v in attributes.items() if v is not None}
        if not domain:
            self._check_known(op_type)
        name = self.names.free(f"{self.prefix}/{op_type}")
        node = oir.node(
            op_type,
            trimmed,
            given,
            domain=domain,
            num_outputs=outputs or 1,
            name=name,
            doc_string=_where_at(self.site).strip(" ()") or None,
        )
        name_results(node, unwanted)
        self.graph.append(node)
        return node.outputs[0] if outputs is None else tuple(node.outputs)

    def _check_known(self, op_type: str) -> None:
        """Errors: `UnsupportedError` for an op that the opset, or ONNX, does not have."""
        known, later = schema_since(op_type, self.opset), schema_since(op_type, OPSETS[""])
        if known is None and (later is not None or not self.contrib):
            raise UnsupportedError(
                f"ONNX has no {op_type} in opset {self.opset}{_where_at(self.site)}; take opset "
                f"{OPSETS['']}, and the ops of ONNX Runtime, too (ops=contrib)"
            )

    def fused(self, op_type: str, *inputs: oir.Value | None, **options: Any) -> Any:
        """A node of ONNX Runtime's own domain, com.microsoft. Errors: `UnsupportedError` where only
        ONNX's own ops are wanted."""
        if not self.contrib:
            raise UnsupportedError(
                f"{op_type} is ONNX Runtime's own op, and ONNX has none for it"
                f"{_where_at(self.site)}; export with the ops of ONNX Runtime, too (ops=contrib)"
            )
        return self.op(op_type, *inputs, domain=MICROSOFT, **options)

    def own(self, op_type: str, *inputs: oir.Value | None, **options: Any) -> Any:
        """A node of graftwork's own domain; only where `probe` says that there are kernels."""
        self.graph.opset_imports[OWN] = 1
        return self.op(op_type, *inputs, domain=OWN, **options)

    def loop(
        self, times: oir.Value, body: Callable[[oir.Value, oir.Value], oir.Value], start: oir.Value
    ) -> Any:
        """A value after i64[] `times` rounds. body: from a round's number i64[] and the value that
        the last one left, f32 of the dims of `start`, to the value that this one leaves."""
        name = self.names.free(f"{self.prefix}/rounds")
        around, known = self.graph, dict(self.memo)
        given = [
            oir.val(f"{name}/number", dtype=oir.DataType.INT64, shape=()),
            oir.val(f"{name}/going", dtype=oir.DataType.BOOL, shape=()),
            oir.Value(name=f"{name}/before", type=oir.TensorType(oir.DataType.FLOAT)),
        ]
        used = dict(around.opset_imports)
        self.graph = inside = oir.Graph(given, [], nodes=[], opset_imports=used, name=name)
        results = self.op("Identity", given[1]), body(given[0], given[2])
        for value, dtype in zip(results, (oir.DataType.BOOL, oir.DataType.FLOAT), strict=True):
            value.dtype = dtype
            inside.outputs.append(value)
        self.graph, self.memo = around, known  # what was worked out inside is not there outside
        return self.op("Loop", times, None, start, body=inside)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, the same each time it is asked for under a key."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def const(self, data: Any, dtype: torch.dtype) -> oir.Value:
        """A small constant tensor, made once for each value."""
        tensor = torch.as_tensor(data, dtype=dtype).contiguous()
        key = (dtype, tuple(tensor.shape), raw_view(tensor).tobytes())
        if key not in self.constants:
            # Functions may meet in one graph.
            name = constant_name(self.function.name, tensor, len(self.constants))
            value = self._typed(name, TensorType.of(tensor))
            value.const_value = oir.tensor_adapters.TorchTensor(tensor, name=name)
            self.outermost.register_initializer(value)
            self.constants[key] = value
        return self.constants[key]

    def weight(self, weight: Weight) -> oir.Value:
        """A reference to a weight; it becomes part of the model once an op uses it."""
        if weight.name not in self.constants:
            value = self._typed(f"weight.{weight.name}", weight.type)
            value.meta["weight"] = weight
            self.constants[weight.name] = value
        return self.constants[weight.name]

    def nibbles(self, weight: Weight, *dims: int) -> oir.Value:
        """A weight of bytes as a tensor of 4-bit numbers with these dims, two a byte."""
        value = self.weight(weight)
        value.dtype, value.shape = oir.DataType.UINT4, oir.Shape(dims)
        return value

    def _use(self, value: oir.Value | None) -> None:
        weight = weight_of(value)
        if value is not None and weight is not None:
            self.pending.setdefault(weight.name, (value, weight))

    def cast(self, value: oir.Value, dtype: torch.dtype, have: torch.dtype | None = None) -> Any:
        """The value in another dtype. have: its dtype, for values inside a row."""
        if (have or type_of(value).dtype) == dtype:
            return value
        made = self.op("Cast", value, to=int(DTYPES[dtype]))
        if "type" in value.meta:
            made.meta["type"] = type_of(value).with_dtype(dtype)
        return made

    def dtype(self) -> torch.dtype:
        """The dtype of the current call's result."""
        return self.type().dtype

    def type(self) -> TensorType:
        """The type of the current call's (first) result."""
        first = self.result[0] if isinstance(self.result, tuple) else self.result
        assert isinstance(first, TensorType)
        return first

    # -- symbolic sizes

    def size(self, dim: Dim | oir.Value) -> Any:
        """A dim as a one-element i64 tensor."""
        if isinstance(dim, int):
            return self.const([dim], torch.int64)
        if isinstance(dim, oir.Value):
            return self.op("Reshape", self.cast(dim, torch.int64), self.const([1], torch.int64))
        return self.once(("size", dim.text), lambda: self._computed(dim))

    def _computed(self, dim: Sym) -> Any:
        result = dim.evaluate(lambda name: _Size(self, self._symbol(name)))
        return result.value if isinstance(result, _Size) else self.size(result)

    def scalar(self, dim: Dim) -> Any:
        """A dim as an i64 tensor without axes."""
        if isinstance(dim, int):
            return self.const(dim, torch.int64)
        return self.op("Squeeze", self.size(dim))

    def shape(self, dims: Sequence[Dim]) -> Any:
        """Dims as a one-dimensional i64 tensor."""
        if all(isinstance(d, int) for d in dims):
            return self.const(list(dims), torch.int64)
        key = ("shape", tuple(str(d) for d in dims))
        return self.once(key, lambda: self.op("Concat", *(self.size(d) for d in dims), axis=0))

    def reshape(self, value: oir.Value, have: Sequence[Dim], want: Sequence[Dim]) -> Any:
        """A value of dims `have` in dims `want`; computes no shape where 0 and -1 can say it."""
        target: list[Dim] = []
        for axis, dim in enumerate(want):
            same = axis < len(have) and have[axis] == dim and isinstance(dim, Sym)
            target.append(0 if same else dim)
        symbolic = [axis for axis, dim in enumerate(target) if isinstance(dim, Sym)]
        if len(symbolic) == 1:
            target[symbolic[0]] = -1
        elif symbolic:
            target = list(want)
        return self.op("Reshape", value, self.shape(target))

    def _symbol(self, name: str) -> Any:
        """The value of a symbol, i64[1], read off an input."""
        found = [node for node in self.function.inputs if Sym(name) in node.meta["type"].dims]
        if not found:
            raise UnsupportedError(f"{self.function.name}: no input carries the size {name}")
        axis = found[0].meta["type"].dims.index(Sym(name))
        given = self._input(found[0])
        shape = partial(self.op, "Shape", given, start=axis, end=axis + 1)
        return self.once(("symbol", name), shape)


def type_of(value: oir.Value) -> TensorType:
    """The IR type of a value that stands for an IR value (not for a row's intermediate)."""
    found: TensorType = value.meta["type"]
    return found


def weight_of(value: oir.Value | None) -> Weight | None:
    """The weight that a value refers to, if it does."""
    return None if value is None else value.meta.get("weight")


def stored_parts(
    weight: oir.Value,
    scale: oir.Value,
    offset: oir.Value | None,
    codebook: oir.Value | None = None,
) -> tuple[Weight, Weight, Weight | None, Weight | None]:
    """The weights that the parts of a weight of few bits refer to, as its op takes them."""
    held, scales = weight_of(weight), weight_of(scale)
    assert held is not None and scales is not None
    return held, scales, weight_of(offset), weight_of(codebook)


class _Size:
    """A size under computation: i64[1] with +, * and ** recorded as ONNX nodes."""

    def __init__(self, emitter: Emitter, value: oir.Value) -> None:
        self.emitter, self.value = emitter, value

    def _combine(self, op_type: str, other: Any) -> _Size:
        right = other.value if isinstance(other, _Size) else self.emitter.size(int(other))
        return _Size(self.emitter, self.emitter.op(op_type, self.value, right))

    def __add__(self, other: Any) -> _Size:
        return self._combine("Add", other)

    def __mul__(self, other: Any) -> _Size:
        return self._combine("Mul", other)

    def __pow__(self, other: Any) -> _Size:
        return self._combine("Pow", other)

    __radd__ = __add__
    __rmul__ = __mul__


def raw_view(tensor: torch.Tensor) -> Any:
    """A tensor's memory as a numpy array of bytes: row-major, little endian, not copied."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _looked_up(function: Function) -> frozenset[str]:
    """Weights whose rows are looked up, such as embedding tables."""
    tables = [n.args[0] for n in function.calls(torch.ops.aten.embedding.default)]
    return frozenset(str(t.target) for t in tables if isinstance(t, torch.fx.Node))


def _where_at(site: Site) -> str:
    return f" ({site.module or site.line})" if site.module or site.line else ""
