"""Patterns: plain torch code, traced to the ATen nodes of programs.

A pattern's inputs are described by short texts:

- ``F[B,T,H]``: any value of a floating dtype; all F of a match are one dtype, H binds a size;
- ``F[...,H]``: the same for any number of leading axes;
- ``f32[H]``, ``i64[B,T]``: a value of that dtype;
- ``@F[H]``: a weight;
- ``float`` or ``int``: a scalar constant (``eps``), captured.

Computed sizes become expressions: with ``x: F[B,T,2*R]``, ``x.shape[-1] // 2`` is R. Tracing runs
on distinct large primes as sizes, so that sizes are not specialized.

Patterns and programs are compared in normal form (`ir.rewrite.normal`). Frontends merge ops that
only move values, such as permutes of permutes, so a pattern should begin and end with ops that
compute.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..function import cone
from ..ops.decompositions import decompositions, is_kept
from ..support.errors import GraftworkError
from ..support.threads import traces
from ..types import DTYPE_NAMES, Dim, Sym, TensorType, make_dim
from .normal import IDENTITIES, kind_of

A = torch.ops.aten

_PRIMES = (7919, 7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017, 8039, 8053, 8059)
_LEADING = ("any0", "any1")  # the axes of "..." in tracing


@dataclass(frozen=True)
class Hole:
    """A captured scalar in a pattern's arguments."""

    name: str


@dataclass(frozen=True)
class InputSpec:
    """One tensor input of a pattern. dtype None: the match's floating dtype F."""

    dtype: torch.dtype | None
    dims: tuple[Dim, ...]
    loose: bool
    weight: bool


Spec = InputSpec | type[float] | type[int]


def parse_spec(text: str) -> Spec:
    """Read an input description (see the module docstring). Errors: `GraftworkError`."""
    scalars: dict[str, type[float] | type[int]] = {"float": float, "int": int}
    if text in scalars:
        return scalars[text]
    body = text.removeprefix("@")
    free = body.startswith("F[")
    plain = ("f32" + body[1:]) if free else body
    loose = "[...," in plain or "[...]" in plain
    plain = plain.replace("[...,", "[").replace("[...]", "[]")
    parsed = TensorType.parse(plain)
    return InputSpec(None if free else parsed.dtype, parsed.dims, loose, text.startswith("@"))


@dataclass(frozen=True)
class Pattern:
    """A traced pattern: its graph, specifications of inputs, and the result's node."""

    graph: torch.fx.Graph
    inputs: Mapping[str, Spec]
    root: torch.fx.Node
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Number of op calls in the pattern."""
        return sum(node.op == "call_function" for node in self.graph.nodes)


@traces
def trace_pattern(
    function: Callable[..., Any], inputs: Mapping[str, str], dtype: torch.dtype
) -> Pattern:
    """Trace torch code with F = dtype. Errors: `GraftworkError` for a constant tensor, an unused
    input, or a result that is not a tensor."""
    specs = {name: parse_spec(text) for name, text in inputs.items()}
    return _Tracer(specs, dtype).trace(function)


class _Tracer:
    def __init__(self, specs: Mapping[str, Spec], dtype: torch.dtype) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.specs, self.dtype = specs, dtype
        self.mode = FakeTensorMode()
        tensors = [s for s in specs.values() if isinstance(s, InputSpec)]
        names = {s for spec in tensors for d in spec.dims if isinstance(d, Sym) for s in d.symbols}
        ordered = [*_LEADING, *sorted(names)]
        if len(ordered) > len(_PRIMES):
            raise GraftworkError(f"a pattern may use {len(_PRIMES) - 2} size names, not {names}")
        self.sizes = dict(zip(ordered, _PRIMES, strict=False))
        self.scalars = {
            name: _PRIMES[-1 - i] * (3 if spec is int else 1e-7)
            for i, (name, spec) in enumerate(specs.items())
            if not isinstance(spec, InputSpec)
        }
        self.graph = torch.fx.Graph()

    def example(self, spec: InputSpec) -> torch.Tensor:
        leading = tuple(Sym(name) for name in _LEADING) if spec.loose else ()
        shape = TensorType(spec.dtype or self.dtype, leading + spec.dims).bind(self.sizes)
        return torch.empty(shape.shape, dtype=shape.dtype)

    def trace(self, function: Callable[..., Any]) -> Pattern:
        from torch.fx.experimental.proxy_tensor import make_fx

        names = [n for n, s in self.specs.items() if isinstance(s, InputSpec)]

        def flat(*tensors: torch.Tensor) -> Any:
            result = function(**dict(zip(names, tensors, strict=True)), **self.scalars)
            if not isinstance(result, torch.Tensor):
                raise GraftworkError(f"it returns a {type(result).__name__}, not a tensor")
            return result

        with self.mode, torch.no_grad():
            examples = [self.example(self.specs[n]) for n in names]  # type: ignore[arg-type]
            module = self.run(make_fx(flat, pre_dispatch=True), examples)
            root = self.rebuild(module.graph, names)
        return self.finish(root)

    def run(self, tracing: Callable[..., Any], examples: list[torch.Tensor]) -> Any:
        try:
            return tracing(*examples)
        except Exception as error:  # the pattern's code raises anything
            shapes = ", ".join(str(TensorType.of(t)) for t in examples)
            raise GraftworkError(
                f"the pattern cannot be traced with ({shapes}): {error}"
            ) from error

    def rebuild(self, traced: torch.fx.Graph, names: list[str]) -> torch.fx.Node:
        """Decompose composites that programs do not contain."""
        env: dict[torch.fx.Node, Any] = {}
        waiting = iter(names)
        for node in traced.nodes:
            if node.op == "placeholder":
                env[node] = self.graph.placeholder(next(waiting))
                env[node].meta = self.meta(node)
            elif node.op == "output":
                return _node(env[node.args[0]])
            elif node.op != "call_function":
                raise GraftworkError(
                    "the pattern makes a constant tensor; pass it as an input or use a number"
                )
            elif node.target is operator.getitem:
                env[node] = self.item(node, env)
            elif node.target in IDENTITIES or is_kept(node.target):
                env[node] = self.copy(node, env)
            else:
                env[node] = self.decompose(node, env)
        raise GraftworkError("the pattern returns nothing")

    def item(self, node: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> torch.fx.Node:
        source, index = env[node.args[0]], node.args[1]  # type: ignore[index]
        if isinstance(source, (tuple, list)):
            return _node(source[index])  # type: ignore[index]
        if source.target is not A.split_with_sizes.default:
            return self.copy(node, env)
        # Programs have slices in the place of splits.
        whole, sizes, *axis = source.args
        start = _total(sizes[:index])
        ends = (start, _total([start, sizes[index]]))
        return self.add(A.slice.Tensor, (whole, *(axis or [0]), *ends), {}, node)

    def copy(self, node: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> torch.fx.Node:
        def convert(arg: Any) -> Any:
            return env[arg] if isinstance(arg, torch.fx.Node) else self.scalar(arg)

        args, kwargs = map_aggregate(node.args, convert), map_aggregate(node.kwargs, convert)
        return self.add(node.target, args, kwargs, node)

    def add(self, target: Any, args: Any, kwargs: Any, traced: torch.fx.Node) -> torch.fx.Node:
        """A node of the pattern; ops that only move values are merged as by frontends."""
        meta = self.meta(traced)
        source: Any = args[0] if args else None
        if target in IDENTITIES:
            return _node(source)
        if kind_of(target) is A.reshape.default:
            if kind_of(source.target) is A.reshape.default:
                source = source.args[0]
            if source.meta.get("type") == meta.get("type"):
                return _node(source)
            target, args, kwargs = A.reshape.default, (source, list(meta["type"].dims)), {}
        made = self.graph.call_function(target, args, kwargs)
        made.meta = meta
        return made

    def meta(self, traced: torch.fx.Node) -> dict[str, Any]:
        """The type of a traced value, with sizes as expressions."""
        value = traced.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return {}
        return {"type": TensorType(value.dtype, tuple(self.scalar(n) for n in value.shape))}

    def decompose(self, node: torch.fx.Node, env: Mapping[torch.fx.Node, Any]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        sources = node.all_input_nodes

        def again(*tensors: Any) -> Any:
            values = dict(zip(sources, tensors, strict=True))

            def lookup(arg: Any) -> Any:
                return values[arg] if isinstance(arg, torch.fx.Node) else arg

            args, kwargs = map_aggregate(node.args, lookup), map_aggregate(node.kwargs, lookup)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        fakes = [n.meta["val"] for n in sources]
        inner = make_fx(again, decomposition_table=decompositions())(*fakes).graph
        local: dict[torch.fx.Node, Any] = {}
        waiting = iter(sources)
        for step in inner.nodes:
            if step.op == "placeholder":
                local[step] = env[next(waiting)]
            elif step.op == "call_function":
                item = step.target is operator.getitem
                local[step] = (self.item if item else self.copy)(step, local)
            elif step.op == "output":
                return map_aggregate(step.args[0], lambda n: local[n])  # type: ignore[index]
        raise GraftworkError(f"the pattern calls {node.target}, which needs a constant tensor")

    def scalar(self, value: Any) -> Any:
        """Map numbers that come from sizes to expressions, from scalar inputs to holes."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        for name, marker in self.scalars.items():
            if value == marker:
                return Hole(name)
        if isinstance(value, float):
            return value
        rest, factors = value, []
        for name, prime in self.sizes.items():
            while rest and rest % prime == 0:
                rest //= prime
                factors.append(name)
        return make_dim("*".join([str(rest), *factors])) if factors else value

    def finish(self, root: torch.fx.Node) -> Pattern:
        self.graph.output(root)
        self.graph.eliminate_dead_code()
        members = cone([root])
        if root.op != "call_function":
            raise GraftworkError("the pattern computes nothing")
        used = {n.target for n in members if n.op == "placeholder"} | self.holes(members)
        if missing := set(self.specs) - used:
            raise GraftworkError(f"the traced pattern does not use {sorted(missing)}")
        return Pattern(self.graph, self.specs, root, self.dtype)

    def holes(self, members: set[torch.fx.Node]) -> set[Any]:
        found: set[Any] = set()
        for node in members:
            map_aggregate((node.args, dict(node.kwargs)), lambda a: found.add(a))
        unknown = {s for d in found if isinstance(d, Sym) for s in d.symbols} & set(_LEADING)
        if unknown:
            raise GraftworkError('the pattern reads a size of the axes behind "..."; name them')
        return {a.name for a in found if isinstance(a, Hole)}


def _node(value: Any) -> torch.fx.Node:
    assert isinstance(value, torch.fx.Node)
    return value


def _total(sizes: Sequence[Dim]) -> Dim:
    return make_dim(" + ".join(f"({size})" for size in sizes) or "0")


def spec_text(spec: InputSpec, dtype: torch.dtype) -> str:
    """An input's specification, for messages."""
    dims = [*(["..."] if spec.loose else []), *(str(d) for d in spec.dims)]
    kind = "a weight " if spec.weight else ""
    return f"{kind}{DTYPE_NAMES[spec.dtype or dtype]}[{','.join(dims)}]"
