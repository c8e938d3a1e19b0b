"""Runs a program with ONNX Runtime: owns the states and one session a function and variant."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch

from ...ir import GraftworkError, InputError, Program, UnsupportedError, type_of
from ...ir.errors import execution_error
from ...ir.executable import HeldCall, Outputs
from ...ir.scratch import Scratch
from ...ir.threads import Turn, traces
from ..target import Target
from .buffers import StateBuffers
from .emit import emit
from .held import Held
from .lower import Variant, is_step, lower
from .routing import Route, Router
from .session import open_session
from .step import Step
from .store import WeightFile, store


class OnnxExecutable:
    """See `ir.executable.Executable`. Any width runs equally well; sessions are made when needed.

    Weights lie in a temporary folder that lives as long as the executable; sessions map them.
    """

    def __init__(self, program: Program, target: Target) -> None:
        _require_dtypes(program, target)
        self.program, self.target = program, target
        self._scratch = _scratch()
        self._weights = WeightFile(self._scratch.path / "weights.data")
        device = target.device
        self._buffers = StateBuffers(
            program.states, _readers(program), program.info.context, device
        )
        self._buffers.begin(1, 1)
        self._made: dict[str, dict[Variant, Step]] = {name: {} for name in program.functions}
        self._routers = {n: Router(program, f, target) for n, f in program.functions.items()}
        self.preparing = 0.0
        self.turn = Turn()

    @property
    def capacity(self) -> int:
        """Rows that each sequence's caches hold now."""
        return self._buffers.capacity

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` sequences; room for `rows` rows takes memory only once it is written."""
        self._buffers.begin(batch, min(rows, self._buffers.limit))

    def reserve(self, rows: int) -> None:
        """Grow the caches, keeping their rows. Errors: `InputError` past the model's context."""
        self._buffers.reserve(rows)

    def widths(self, function: str) -> tuple[int, ...] | None:
        """None: shapes are dynamic."""
        return None

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> Outputs:
        """Run a function; states change in place; outputs live until the next call."""
        step, route = self._routed(function, inputs)
        results = step.run(route.feeds, fetch)
        return step.first_column(results) if route.widened else results

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        """The call, bound to the tensors' own memory."""
        # Held calls do not keep the executable alive.
        routed = weakref.WeakMethod(self._routed)
        return Held(routed, self._buffers, function, inputs, fetch)

    def _routed(self, function: str, inputs: Mapping[str, torch.Tensor]) -> tuple[Step, Route]:
        """Who takes a call, and how; there is room for it."""
        made = self._made[function]
        route = self._routers[function].route(inputs, made)
        if route.rows + route.overhang > self._buffers.capacity:
            self._make_room(function, route)
        step = made.get(route.variant)
        if step is None:
            start = perf_counter()
            step = made[route.variant] = self._compile(function, route.variant)
            self.preparing += perf_counter() - start
        return step, route

    def _make_room(self, function: str, route: Route) -> None:
        if route.rows > self._buffers.capacity:
            raise InputError(
                f"{function}: the step needs {route.rows} cache rows and there are "
                f"{self._buffers.capacity}; call reserve({route.rows}) first"
            )
        self._buffers.reserve(route.rows + route.overhang)  # for what nobody asked for

    @traces
    def _compile(self, function: str, variant: Variant) -> Step:
        lowered = lower(self.program, function, variant)
        fn = lowered.function(function)
        # Numbered: a name that came with a file says nothing about where to write.
        number = list(self.program.functions).index(function)
        path = self._scratch.path / f"{number}.{variant}.onnx"
        size = sum(weight.type.nbytes for weight in lowered.weights.values())
        try:
            model = emit(fn, lowered.weights, paired=self._routers[function].pairs)
            store(model, path, self._weights)
        except OSError as error:
            raise InputError(
                f"cannot write {size >> 20} MB of weights to {path.parent}: {error}; "
                f"set TMPDIR to a folder with room"
            ) from error
        # The step's threads spin for a while after its work. Threads of another session would
        # have to take the cores from them, so what is drafted in between uses one.
        threads = None if is_step(function) else 1
        try:
            session = open_session(path, self.target, weight_bytes=size, threads=threads)
        except GraftworkError:
            raise
        except Exception as error:  # the library's error types are not public
            raise execution_error(function, error) from error
        return Step(fn, session, self._buffers)

    def keep_rows(self, function: str, past: torch.Tensor, source: torch.Tensor) -> None:
        """Commit a path of the function's last run."""
        self._buffers.keep_rows(function, past, source)

    def state_bytes(self) -> int:
        """Bytes that the state buffers take (memory that was never written is not there yet)."""
        return self._buffers.nbytes()


def _scratch() -> Scratch:
    try:
        return Scratch()
    except OSError as error:
        raise InputError(
            f"cannot make a folder for weights: {error}; set TMPDIR to a folder with room"
        ) from error


def _readers(program: Program) -> dict[str, tuple[str, ...]]:
    """The functions that read each state."""
    functions = program.functions.items()
    return {
        state: tuple(name for name, function in functions if function.has_input(state))
        for state in program.states
    }


def _require_dtypes(program: Program, target: Target) -> None:
    """Errors: `UnsupportedError` for bfloat16 on the CPU, which has no kernels for it."""
    if target.device != "cpu":
        return
    types = [state.type for state in program.states.values()]
    types += [type_of(n) for f in program.functions.values() for n in f.outputs.values()]
    if any(t.dtype == torch.bfloat16 for t in types):
        raise UnsupportedError(
            f"target {target}: ONNX Runtime has no bfloat16 kernels on the CPU; "
            f"import the model in float32 (target onnxruntime:cpu:float32)"
        )
