"""Runs a program with torch: owns the state buffers and one compiled module a variant."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch._inductor import config as inductor

from ...ir import InputError, Program, Sym
from ...ir.executable import HeldCall, Outputs
from ..target import Target
from .emit import emit

PREFILL = 128
"""Tokens a prefill step takes at most when widths are static."""

BUCKETS = {"eager": 256, "torch": 1024}
"""Cache rows are reserved in multiples that start here and double, by backend: attention reads all
of them, and for each number of rows inductor compiles every width anew."""

OPTIONAL = frozenset({"ancestors"})

LINEAR_INT8 = torch.ops.graftwork.linear_int8.default


class TorchExecutable:
    """See `ir.executable.Executable`. Inductor's widths are static: 1, the plan's, a prefill's."""

    def __init__(self, program: Program, target: Target) -> None:
        self.program = program
        self.target = target
        self.bucket = BUCKETS[target.backend]
        self.capacity = 0
        self.batch = 0
        self.device = torch.device(target.device)
        self.states: dict[str, torch.Tensor] = {}
        self.weights = _load_weights(program, target)
        self.variants: dict[object, Callable[..., Any]] = {}
        self.compiled: set[object] = set()
        self.preparing = 0.0
        if target.threads is not None:
            torch.set_num_threads(target.threads)

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` sequences with small empty caches; attention reads all of the capacity."""
        self.states, self.capacity, self.batch = {}, 0, batch
        self.reserve(min(rows, self.bucket))

    def reserve(self, rows: int) -> None:
        """Grow the state buffers, keeping their rows."""
        if rows <= self.capacity:
            return
        capacity = max(self.capacity, min(self.bucket, self._limit()))
        while capacity < rows:
            capacity = min(2 * capacity, self._limit())
            if capacity < rows and capacity == self._limit():
                raise InputError(
                    f"{rows} cache rows asked for, but {self.program.name} has a context of "
                    f"{self.program.info.context} tokens"
                )
        for name, state in self.program.states.items():
            bound = state.type.bind({"B": self.batch, "C": capacity})
            buffer = torch.zeros(bound.shape, dtype=bound.dtype, device=self.device)
            if name in self.states:
                axis = state.type.dims.index(Sym("C"))
                buffer.narrow(axis, 0, self.capacity).copy_(self.states[name])
            self.states[name] = buffer
        self.capacity = capacity

    def _limit(self) -> int:
        # A step may be wider than what is left of the context; what is over is never committed.
        return self.program.info.context + max(self.widths("step") or (PREFILL,))

    def widths(self, function: str) -> tuple[int, ...] | None:
        """None when eager; else 1, what a verification step takes, and a prefill chunk."""
        if self.target.backend == "eager":
            return None
        return tuple(sorted({1, self.program.plan.columns + 1, PREFILL}))

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> Outputs:
        """Run one step; states change in place."""
        shapes = tuple((name, tensor.shape) for name, tensor in inputs.items())
        key = (function, tuple(fetch), shapes if self.target.backend != "eager" else len(shapes))
        variant = self.variants.get(key)
        if variant is None:
            variant = self.variants[key] = self._compile(function, frozenset(inputs), fetch)
        arguments = [
            self.states[name] if name in self.states else inputs[name].to(self.device)
            for name in self._argument_names(function, frozenset(inputs))
        ]
        start = perf_counter()
        with torch.no_grad():
            results = variant(*arguments)
        # The first call compiles, and again once the caches have grown.
        if self.target.backend != "eager" and (key, self.capacity) not in self.compiled:
            self.compiled.add((key, self.capacity))
            self.preparing += perf_counter() - start
        return dict(zip(fetch, results, strict=True))

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        """The call; what it costs is the compiler's affair."""
        # Held calls do not keep the executable alive.
        alive = weakref.WeakMethod(self.run)

        def call() -> Outputs:
            run = alive()
            assert run is not None
            return run(function, inputs, fetch)

        return call

    def _argument_names(self, function: str, given: frozenset[str]) -> list[str]:
        names = [str(node.target) for node in self.program.function(function).inputs]
        return [n for n in names if n in self.states or n in given]

    def _compile(
        self, function: str, given: frozenset[str], fetch: Sequence[str]
    ) -> Callable[..., Any]:
        fn = self.program.function(function)
        missing = {str(n.target) for n in fn.inputs} - given - set(self.program.states)
        if not missing <= OPTIONAL:
            raise InputError(f"{function} also needs the inputs {', '.join(sorted(missing))}")
        module = emit(fn, self.weights, list(self.program.states), fetch, frozenset(missing))
        if self.target.backend == "eager":
            return module
        return _inductor(module, self.target)

    def keep_rows(self, function: str, past: torch.Tensor, source: torch.Tensor) -> None:
        """Move the cache rows of an accepted path to the front of the step's rows."""
        steps = torch.arange(source.shape[1])
        if bool((source == steps).all()):
            return
        here, there = (past[:, None] + source), (past[:, None] + steps)
        reads = self.program.function(function).has_input
        for name, state in self.program.states.items():
            if not reads(name) or Sym("C") not in state.type.dims:
                continue
            axis, buffer = state.type.dims.index(Sym("C")), self.states[name]
            rows = buffer.gather(axis, _along(here, buffer, axis))
            buffer.scatter_(axis, _along(there, buffer, axis), rows)

    def state_bytes(self) -> int:
        """Bytes of all state buffers."""
        return sum(tensor.nbytes for tensor in self.states.values())


def _along(rows: torch.Tensor, buffer: torch.Tensor, axis: int) -> torch.Tensor:
    """Row numbers i64[B,N] as an index of `buffer` (batch first) along `axis`."""
    shape = [1] * buffer.dim()
    shape[0], shape[axis] = rows.shape
    full = list(buffer.shape)
    full[axis] = rows.shape[1]
    return rows.to(buffer.device).reshape(shape).expand(full)


def _load_weights(program: Program, target: Target) -> dict[str, torch.Tensor]:
    """All weights; those that only `linear_int8` multiplies by are float32 for inductor on the CPU.

    The op sums int8 values in float32, so converted weights give the same bits; converting them
    here is done once, and not in every step or for every width.
    """
    device = torch.device(target.device)
    converts = target.backend == "torch" and target.device == "cpu"
    wide = _int8_factors(program) if converts else frozenset()
    loaded = {name: weight.load().to(device) for name, weight in program.weights.items()}
    return {name: value.float() if name in wide else value for name, value in loaded.items()}


def _int8_factors(program: Program) -> frozenset[str]:
    """Weights that are the second argument of `linear_int8` and nothing else."""
    factors: set[str] = set()
    others: set[str] = set()
    for function in program.functions.values():
        for node in function:
            if node.op != "get_attr":
                continue
            only = bool(node.users) and all(
                user.target is LINEAR_INT8
                and [i for i, arg in enumerate(user.args) if arg is node] == [1]
                for user in node.users
            )
            (factors if only else others).add(str(node.target))
    return frozenset(factors - others)


def _inductor(module: torch.fx.GraphModule, target: Target) -> Callable[..., Any]:
    """Compile for speed: frozen (constant) weights on the CPU, CUDA graphs on a GPU."""
    on_cpu = target.device == "cpu"
    options: dict[str, Any] = {} if on_cpu else {"triton.cudagraphs": True}
    compiled: Callable[..., Any] = torch.compile(
        module, fullgraph=True, dynamic=None, options=options
    )
    return _freezing(compiled) if on_cpu else compiled


def _freezing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, whose weights become constants whenever a call compiles it.

    torch.compile's own option `freezing` comes too late: dynamo decides by the global setting
    whether weights are constants or arguments, and arguments leave nothing to freeze. Nothing is
    prepacked: in float32 that is a copy of all weights for each width, and slower at width 1.
    """

    def call(*arguments: torch.Tensor) -> Any:
        with inductor.patch({"freezing": True, "cpp.weight_prepack": False}):
            return compiled(*arguments)

    return call
