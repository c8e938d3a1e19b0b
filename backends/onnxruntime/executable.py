"""Runs a program with ONNX Runtime: owns the states and one session a function and variant."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ...ir import Function, GraftworkError, InputError, Program, UnsupportedError, type_of
from ...ir.execution.analysis import is_repeatable
from ...ir.execution.executable import ANY, DECOMPOSED, HeldCall, KernelUse, Memory, Outputs, Widths
from ...ir.support.errors import execution_error
from ...ir.support.scratch import Scratch
from ...ir.support.threads import traces
from ..base import StatefulExecutable
from ..kernel_uses import decomposed
from ..staging import Stream
from ..target import Target
from .attention import OVERHANG
from .device_weights import DeviceWeights
from .emit import emit
from .lower import Variant, lower
from .probe import mixtures_work
from .repeated import RepeatedCall
from .routing import COUNTED, Route, Router
from .rows_quantized import needs_packing
from .session import open_session
from .step import SessionMemory, Step
from .store import WeightFile, store
from .threads import Threads
from .wide import widen

GRAIN = 64
"""Capacities are multiples of this many rows (or the limit)."""

MIXTURES = (torch.ops.graftwork.moe.default, torch.ops.graftwork.quantized_moe.default)
"""Ops whose kernel some devices fail to run, see `mixtures_work`."""


@dataclass(frozen=True)
class Written:
    """The files of an executable. sessions: the file and step of each function's variants. routers:
    by function."""

    weights: WeightFile
    sessions: Mapping[str, Mapping[Variant, tuple[Path, Step]]]
    routers: Mapping[str, Router]


class Opened(NamedTuple):
    """A session and the function that it runs. memory: of its inputs and outputs; one for all
    sequences, as one run is made at a time."""

    function: Function
    session: Any
    memory: SessionMemory


class OnnxExecutable(StatefulExecutable):
    """See `ir.executable.Executable`. Any width runs equally well; sessions are made when needed.

    Weights lie in a temporary folder that lives as long as the executable; sessions map them.
    """

    packs = True

    def __init__(self, program: Program, target: Target) -> None:
        _require_dtypes(program, target)
        limit = program.info.context + OVERHANG
        self.stream = _stream(target)
        queued = nullcontext if self.stream is None else self.stream.current
        super().__init__(program, target, limit, _rounded, queued=queued)
        self._scratch = _scratch()
        self._weights = WeightFile(self._scratch.path / "weights.data")
        self._on_device = None if self.stream is None else DeviceWeights(self.stream.device)
        self.buffers.begin(1, 1, anew=True)
        self._kernels: dict[str, tuple[KernelUse, ...]] = {}
        self._opened: dict[tuple[str, Variant], Opened] = {}
        self._forget_addresses()
        self._routers = {n: Router(program, f, target) for n, f in program.functions.items()}
        self._threads = Threads.of(program, target)

    def _forget_addresses(self) -> None:
        self._made: dict[str, dict[Variant, Step]] = {name: {} for name in self.program.functions}

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` sequences; room for `rows` rows takes memory only once it is written."""
        self.begun += 1
        self.buffers.begin(batch, min(rows, self.buffers.limit), anew=False)

    def resume(self, rows: int) -> None:
        """Go on with the sequences there are."""
        self.buffers.reserve(min(rows, self.buffers.limit))

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the caches by half at least, keeping their rows."""
        capacity = self.capacity
        if rows > capacity:
            rows = max(rows, min(capacity + capacity // 2, self.buffers.limit))
        super().reserve(rows, symbol)

    def memory(self) -> Memory:
        """The weight file, the states, and the graphs of the sessions so far."""
        graphs = sum(path.stat().st_size for path in self._scratch.path.glob("*.onnx"))
        return Memory(self._weights.end, self.state_bytes(), graphs)

    def written(self) -> Written:
        """The files of the sessions so far; they go with the executable."""
        sessions = {
            name: {variant: (self._file(name, variant), step) for variant, step in made.items()}
            for name, made in self._made.items()
        }
        return Written(self._weights, sessions, self._routers)

    def _file(self, function: str, variant: Variant) -> Path:
        # Numbered: a name that came with a file says nothing about where to write.
        number = list(self.program.functions).index(function)
        return self._scratch.path / f"{number}.{variant}.onnx"

    def kernels(self) -> tuple[KernelUse, ...]:
        """Of the functions that have a session."""
        return tuple(use for uses in self._kernels.values() for use in uses)

    def _note_kernels(self, function: str, ran: Mapping[tuple[str, int, str], int]) -> None:
        """Keep what runs products of few bits; look-ups and experts that no kernel takes are
        decomposed before they could be counted."""
        uses = dict(ran)
        known = {what for what, _, _ in uses}
        for use in decomposed(self.program.functions[function]):
            if use.what != "product" and use.what not in known:
                uses[use.what, use.bits, DECOMPOSED] = use.calls
        self._kernels[function] = tuple(KernelUse(function, *use, n) for use, n in uses.items())

    def widths(self, function: str) -> Widths:
        """Any, since shapes are dynamic, unless the target says how many columns steps have."""
        return self._fixed(function) or ANY

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
        # RepeatedCall calls do not keep the executable alive.
        routed = weakref.WeakMethod(self._routed)
        return RepeatedCall(routed, self.buffers, function, inputs, fetch)

    def _routed(self, function: str, inputs: Mapping[str, torch.Tensor]) -> tuple[Step, Route]:
        """Who takes a call, and how; there is room for it."""
        made = self._made[function]
        route = self._routers[function].route(inputs, made)
        if route.rows + route.overhang > self.buffers.room(function):
            self._make_room(function, route)
        step = made.get(route.variant)
        if step is None:
            opened = self._open(function, route.variant)
            step = made[route.variant] = Step(
                opened.function, opened.session, self.buffers, self.stream, opened.memory
            )
        return step, route

    def _open(self, function: str, variant: Variant) -> Opened:
        """The session of a variant."""
        opened = self._opened.get((function, variant))
        if opened is None:
            start = perf_counter()
            opened = self._opened[function, variant] = self._compile(function, variant)
            self.preparing += perf_counter() - start
        return opened

    def _comes_again(self, function: str, variant: Variant) -> bool:
        """Whether runs of a function may be recorded: sessions make such a run more than once."""
        return variant in COUNTED and is_repeatable(self.program.function(function))

    def _make_room(self, function: str, route: Route) -> None:
        room = self.buffers.room(function)
        if route.rows > room:
            raise InputError(
                f"{function}: the step needs {route.rows} cache rows and there are {room}; call "
                f"reserve({route.rows}) first"
            )
        # For what nobody asked for.
        self.buffers.reserve(route.rows + route.overhang, self.buffers.apart.get(function))

    def _refused(self, node: torch.fx.Node) -> bool:
        """Whether the target has no kernel for a call that other targets have one for."""
        if node.target not in MIXTURES or self.target.device == "cpu":
            return False
        return not mixtures_work(self.target.device, type_of(node).dtype)

    @traces
    def _compile(self, function: str, variant: Variant) -> Opened:
        native = self.target.device == "cpu"
        lowered = lower(self.program, function, variant, native=native, refused=self._refused)
        fn = lowered.function(function)
        path = self._file(function, variant)
        size = sum(weight.type.nbytes for weight in lowered.weights.values())
        threads = self._threads.counts[function]
        try:
            pairs = self._routers[function].pairs
            cuda = self.target.device == "cuda"
            how = {"paired": pairs, "native": native, "cuda": cuda}
            model = emit(fn, lowered.weights, threads=threads, **how)
            if cuda:
                widen(model.model.graph)
            store(model, path, self._weights)
            self._note_kernels(function, dict(model.ran))
        except OSError as error:
            raise InputError(
                f"cannot write {size >> 20} MB of weights to {path.parent}: {error}; "
                f"set TMPDIR to a folder with room"
            ) from error
        try:
            own = model.has_own_ops
            shared = None if self._on_device is None else self._on_device.of(model.pending)
            session = open_session(
                path,
                self.target,
                weight_bytes=size,
                copies=not needs_packing(model.model.graph),
                threads=threads,
                own_ops=own,
                in_turn=function in self._threads.in_turn,
                stream=None if self.stream is None else self.stream.handle,
                shared=shared,
                graphs=self._comes_again(function, variant) and cuda,
            )
        except GraftworkError:
            raise
        except Exception as error:  # the library's error types are not public
            raise execution_error(function, error) from error
        return Opened(fn, session, SessionMemory())


def _stream(target: Target) -> Stream | None:
    """What the sessions for a device work in; None where that is the host's memory."""
    return None if target.device == "cpu" else Stream(torch.device(target.device))


def _rounded(rows: int) -> int:
    return -(-max(rows, 1) // GRAIN) * GRAIN


def _scratch() -> Scratch:
    try:
        return Scratch()
    except OSError as error:
        raise InputError(
            f"cannot make a folder for weights: {error}; set TMPDIR to a folder with room"
        ) from error


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
