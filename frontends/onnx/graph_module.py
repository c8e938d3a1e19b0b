"""An ONNX decode graph as a module of torch ops: tokens and positions in, logits out.

Pasts are empty and the attention mask is ones: what is traced is the model on a whole text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import onnx_ir as oir
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import TensorType, UnsupportedError, Weight
from ...ir.support.names import shown
from ...ir.weights import Call
from ..stored_weights import StoredWeight
from . import ops_attention, ops_math, ops_quantized, ops_shape
from .ops_shape import known
from .table import DTYPES, Context, run
from .values import AllTokens, EmptyPast, Parameter, Value, tensor

FAMILIES = (ops_attention, ops_math, ops_quantized, ops_shape)
"""The files that fill the table of ops."""

TOKENS = ("input_ids", "tokens", "input_ids.1", "ids")
MASK, POSITIONS = "attention_mask", ("position_ids", "positions", "pos_ids")
OUTPUT, RANK = "logits", 3
PRODUCTS = ("MatMul", "FusedMatMul")
LARGE = 1 << 12
"""From so many values on whole numbers are weights, too."""


@dataclass
class Roles:
    """Which inputs of a graph are what."""

    tokens: str
    mask: str | None = None
    positions: str | None = None
    pasts: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: oir.Graph) -> Roles:
        """Errors: `UnsupportedError` for a graph that is no decode graph, naming the input."""
        named = {str(value.name): value for value in graph.inputs if not _is_weight(graph, value)}
        whole = [name for name, value in named.items() if _is_tokens(value)]
        tokens = next((name for name in TOKENS if name in whole), None)
        others = [name for name in whole if name != MASK and name not in POSITIONS]
        if tokens is None and len(others) == 1:
            tokens = others[0]
        if tokens is None:
            raise UnsupportedError(
                f"expected an input of token ids i64[B,T] called input_ids, got the inputs "
                f"{', '.join(named)}"
            )
        found = cls(tokens)
        for name, value in named.items():
            if name == MASK:
                found.mask = name
            elif name in POSITIONS:
                found.positions = name
            elif name != tokens:
                found.pasts[name] = _past(name, value)
        return found


def _is_weight(graph: oir.Graph, value: oir.Value) -> bool:
    return value.name in graph.initializers


def _is_tokens(value: oir.Value) -> bool:
    whole = value.dtype in (oir.DataType.INT64, oir.DataType.INT32)
    return whole and value.shape is not None and len(value.shape) == 2


def _past(name: str, value: oir.Value) -> tuple[int, int]:
    """Groups and width of a cache; 0 for a width that the graph does not say."""
    shape = list(value.shape or ())
    floats = value.dtype in (oir.DataType.FLOAT, oir.DataType.FLOAT16, oir.DataType.BFLOAT16)
    if not floats or len(shape) != 4 or not isinstance(shape[1], int):
        raise UnsupportedError(
            f"the input {name!r} is {value.dtype} {[str(dim) for dim in shape]}; expected token "
            f"ids, attention_mask, position_ids, and caches [B,G,P,D] with G known"
        )
    return shape[1], shape[3] if isinstance(shape[3], int) else 0


class GraphModule(nn.Module):
    """See the module docstring. weights: by parameter. made: what reads those of few bits."""

    def __init__(self, graph: oir.Graph, mode: FakeTensorMode, dtype: torch.dtype) -> None:
        super().__init__()
        self.graph, self.mode, self.dtype = graph, mode, dtype
        self.roles = Roles.of(graph)
        self.nodes = list(_needed(graph))
        self.weights: dict[str, Weight] = {}
        self.made: dict[str, Callable[[], StoredWeight]] = {}
        self.constants: dict[oir.Value, Value] = {}
        self.kept: dict[str, Parameter] = {}
        products = {
            node.inputs[1]
            for node in self.nodes
            if node.op_type in PRODUCTS and not node.domain and len(node.inputs) > 1
        }
        read = {value for node in self.nodes for value in node.inputs}
        for value in graph.initializers.values():
            if value in read:
                self.constants[value] = self._constant(value, value in products)

    def _constant(self, value: oir.Value, in_product: bool) -> Value:
        """A weight as a parameter without data, another constant as it is."""
        data = value.const_value
        assert data is not None  # the reader saw to that
        floats = data.dtype in (
            oir.DataType.FLOAT,
            oir.DataType.FLOAT16,
            oir.DataType.BFLOAT16,
        )
        if data.dtype in (oir.DataType.UINT4, oir.DataType.INT4):
            return None  # ops that take them read the data themselves
        if not floats and data.dtype not in DTYPES:
            raise UnsupportedError(
                f"the weight {shown(value.name)} is {data.dtype}, which is not supported yet"
            )
        if data.size == 1 or (not floats and data.size < LARGE):
            return known(data.numpy())
        shape = tuple(int(size) for size in data.shape)  # type: ignore[arg-type]
        turned = in_product and len(shape) == 2
        dtype = self.dtype if floats else DTYPES[data.dtype]
        type = TensorType(dtype, shape[::-1] if turned else shape)
        # One of few bits has another meaning: the floats that `store` makes are called like it.
        name = str(value.name) if floats else f"{value.name}.data"
        return self._parameter(Weight(name, type, Call(_reader(data, dtype, turned))), turned)

    def _parameter(self, weight: Weight, turned: bool = False) -> Parameter:
        """A new parameter. A trace sees what is asked of the module, see `_there`."""
        key = f"w{len(self.weights)}"
        with self.mode:
            made = nn.Parameter(
                torch.empty(weight.type.shape, dtype=weight.type.dtype), requires_grad=False
            )
        self.register_parameter(key, made)
        self.weights[key] = weight
        return Parameter(key, made, turned)

    def store(
        self, name: str, sizes: tuple[int, int], make: Callable[[], StoredWeight]
    ) -> Parameter:
        """The float weight f[N,K] that stands for one of few bits; `make` reads its data later."""
        if name not in self.kept:
            self.made[name] = cache(make)
            values = partial(_values, self.made[name], name, self.dtype)
            type = TensorType(self.dtype, sizes)
            self.kept[name] = self._parameter(Weight(name, type, Call(values)))
        made = self._there(self.kept[name])
        assert isinstance(made, Parameter)
        return made

    @property
    def stored(self) -> dict[str, StoredWeight]:
        """The weights of few bits, by the name of the float weight that stands for each."""
        return {name: make() for name, make in self.made.items()}

    def _there(self, value: Value) -> Value:
        """A constant as it is now: while it is traced, the module's parameters are others."""
        if not isinstance(value, Parameter):
            return value
        return replace(value, tensor=getattr(self, value.name))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, count = tokens.shape
        given: dict[str, Value] = {self.roles.tokens: tokens}
        if self.roles.mask is not None:
            given[self.roles.mask] = AllTokens(batch, count)
        if self.roles.positions is not None:
            given[self.roles.positions] = positions
        for name, (groups, width) in self.roles.pasts.items():
            given[name] = EmptyPast(batch, groups, width)
        env: dict[Any, Value] = {v: self._there(x) for v, x in self.constants.items()}
        env.update(
            {
                value: given.get(str(value.name))
                for value in self.graph.inputs
                if not _is_weight(self.graph, value)
            }
        )
        for node in self.nodes:
            context = Context(node, positions, self.dtype, self.store)
            made = run(context, [None if v is None else env[v] for v in node.inputs])
            results = made if isinstance(made, (tuple, list)) else (made,)
            if len(results) < len(node.outputs):
                raise UnsupportedError(
                    f"node {node.name or node.op_type} ({node.op_type}) has {len(node.outputs)} "
                    f"results; expected {len(results)} at most"
                )
            env.update(zip(node.outputs, results, strict=False))
        return tensor(env[_logits(self.graph)])


def _values(make: Callable[[], StoredWeight], name: str, dtype: torch.dtype) -> torch.Tensor:
    return make().values(name).load().to(dtype)


def _reader(data: Any, dtype: torch.dtype, turned: bool) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        array = data.numpy()
        if data.dtype == oir.DataType.BFLOAT16:
            found = torch.from_numpy(array.view("uint16").copy()).view(torch.bfloat16)
        else:
            found = torch.from_numpy(array.copy())
        return (found.t() if turned else found).to(dtype).contiguous()

    return read


def _logits(graph: oir.Graph) -> oir.Value:
    """The output: that called logits, or the only one [B,T,V]. Errors: `UnsupportedError`."""
    named = {str(value.name): value for value in graph.outputs}
    if OUTPUT in named:
        return named[OUTPUT]
    whole = [value for value in named.values() if len(value.shape or ()) == RANK]
    if len(named) == 1 or len(whole) == 1:
        return next(iter(whole or named.values()))
    raise UnsupportedError(f"expected an output called logits, got {', '.join(named)}")


def _needed(graph: oir.Graph) -> list[oir.Node]:
    """Nodes that the logits need, in order."""
    wanted, nodes = {_logits(graph)}, []
    for node in reversed(list(graph)):
        if wanted.intersection(node.outputs):
            nodes.append(node)
            wanted.update(value for value in node.inputs if value is not None)
    return nodes[::-1]


__all__ = ["GraphModule"]
