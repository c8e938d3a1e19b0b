"""Runs a program with torch: owns the state buffers and one compiled module a variant."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ...ir import LOG, GraftworkError, InputError, Program, Role, Sym
from ...ir.execution.executable import ANY, HeldCall, KernelUse, Memory, Outputs, Widths
from ...ir.plan.inputs import OPTIONAL
from ...ir.support.errors import execution_error
from ...ir.support.threads import traces
from ..base import StatefulExecutable, rounds_activations
from ..faults import index_fault
from ..pages import Trimmer, move_to_huge_pages
from ..target import Target
from . import gpu_products
from .compiled import Compiled, any_size, for_gpu, inductor
from .cpu import ALIKE_ROWS, CPU_ROWS
from .emit import emit
from .gpu import GPU_ROWS
from .graphs import CapturedStep
from .open_axes import OpenAxes
from .repeated import RepeatedCall
from .replay import Recording, Replay, record
from .rows import ROWS
from .tiled import NATIVE, kernels_of, with_tiles

PREFILL = (128, 512)
"""Tokens that prefill steps take on a GPU, where widths are static: weights are read once a step,
and what a short prompt leaves of a wide step is wasted."""

SPARE = 2
"""Caches of the last text stay unless they have so many times the rows that the next may need."""

BUCKETS = {"eager": 256, "inductor": 64, "cuda graphs": 1024}
"""Cache rows are reserved in multiples of these: attention reads all of them. CUDA graphs are
compiled anew, every width, for each number, so theirs doubles."""


class TorchExecutable(StatefulExecutable):
    """See `ir.executable.Executable`. Decode steps have static widths: 1 and the plan's. So have
    prompts on a GPU; on the CPU they share one variant, which takes any number of tokens."""

    def __init__(self, program: Program, target: Target) -> None:
        self.how = _how(target)
        self.bucket = BUCKETS[self.how]
        widest = max((1, program.plan.columns + 1, *PREFILL))
        # A step may be wider than what is left of the context; what is over is never committed.
        limit = program.info.context + widest
        rounded = partial(_rounded, self.bucket, self.how == "cuda graphs")
        super().__init__(program, target, limit, rounded)
        self.device = torch.device(target.device)
        # What is compiled; the program itself stays as others see it.
        laid_out = self.how == "inductor"
        self.rounds = any(map(rounds_activations, program.functions.values()))
        self.lowered = with_tiles(program) if laid_out else program
        self.weights = self._load()
        self.tensors = {weight.data_ptr(): weight.nbytes for weight in self.weights.values()}
        self.code = 0
        self.variants: dict[object, Callable[..., Any]] = {}
        self.compiled: set[object] = set()
        self.recordings: dict[object, Recording | None] = {}
        self._forget_addresses()
        self.open_axes: dict[str, OpenAxes] = {}

    def _forget_addresses(self) -> None:
        self.captured: dict[object, CapturedStep] = {}
        self.captured_epoch = 0

    @property
    def states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return self.buffers.tensors

    def _load(self) -> dict[str, torch.Tensor]:
        """All weights, on the device; those that are in a file as they are stay mapped."""
        trimmer, weights = Trimmer(), {}
        for name, weight in self.lowered.weights.items():
            weights[name] = weight.load().to(self.device)
            trimmer.note(weight.type.nbytes)
        trimmer.done()
        if self.how == "inductor":
            move_to_huge_pages(weights.values())
        return weights

    def begin(self, batch: int, rows: int) -> None:
        """Start `batch` sequences with small empty caches; attention reads all of the capacity.

        What is recorded or captured knows where caches are, so those of the last text stay: on a
        GPU always, on the CPU where they are not much larger than these texts may need.
        """
        self.begun += 1
        self._set_threads()
        most = {"eager": 0, "inductor": SPARE * self.buffers.rounded(rows)}.get(self.how)
        anew = most is not None and self.capacity > most
        self.buffers.begin(batch, min(rows, self.bucket), anew=anew)
        self._mark()

    def resume(self, rows: int) -> None:
        """Go on with the sequences there are; caches grow when there is need."""
        self._set_threads()

    def _set_threads(self) -> None:
        # Torch's number is its thread's, and another executable may have set it since.
        if self.target.threads is not None:
            torch.set_num_threads(self.target.threads)

    def reserve(self, rows: int, symbol: str | None = None) -> None:
        """Grow the state buffers, keeping their rows."""
        super().reserve(rows, symbol)
        self._mark()

    def _mark(self) -> None:
        """What is compiled serves caches of any length."""
        if self.how != "inductor":
            return
        for name, state in self.program.states.items():
            if not state.recurrent and state.capacity is not None:
                any_size(self.states[name], state.type.dims.index(Sym(state.capacity)))

    def memory(self) -> Memory:
        """Weights and what was prepared of them, the states, and the modules so far, as text."""
        return Memory(sum(self.tensors.values()), self.state_bytes(), self.code)

    def kernels(self) -> tuple[KernelUse, ...]:
        """Of all functions: weights are laid out for kernels before any is compiled."""
        if self.how == "cuda graphs":
            return gpu_products.kernels_of(self.program)
        return kernels_of(self.lowered)

    def widths(self, function: str) -> Widths:
        """The target's columns; or any when eager; or what the plan's steps take, on the CPU some
        less than that and any more, on a GPU prefill chunks."""
        fixed, plan = self._fixed(function), self.program.plan
        if fixed is not None:
            return fixed
        if self.how == "eager":
            return ANY
        if self.how == "inductor":
            return Widths(tuple(sorted({*plan.widths, *plan.between})), more=True)
        # On a GPU a column less saves less than another step in memory takes.
        return Widths(tuple(sorted({*plan.widths, *PREFILL})))

    def run(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> Outputs:
        """Run one step; states change in place."""
        key = self._key(function, inputs, fetch)
        variant = self.variants.get(key)
        if variant is None:
            start = perf_counter()
            variant = self.variants[key] = self._compile(function, frozenset(inputs), fetch)
            self.preparing += perf_counter() - start
        arguments = self._arguments(function, inputs)
        if self._version(key) not in self.compiled:
            self._mark()  # memory may be new through growth of another part of the sequences
        start = perf_counter()
        try:
            with torch.no_grad():
                results = variant(*arguments)
        except GraftworkError:
            raise
        except Exception as error:  # ops raise whatever they like
            raise index_fault(error, function) or execution_error(function, error) from error
        compiled = self._version(key)
        if self.how != "eager" and compiled not in self.compiled:
            self.compiled.add(compiled)
            self.preparing += perf_counter() - start
        return {name: result.cpu() for name, result in zip(fetch, results, strict=True)}

    def hold(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> HeldCall:
        """The call; its kernels alone, where a compiled step is nothing else."""
        # RepeatedCall calls do not keep the executable alive.
        replayed = weakref.WeakMethod(self.replayed)
        return RepeatedCall(replayed, self.buffers, function, dict(inputs), tuple(fetch))

    def replayed(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> tuple[Outputs, Callable[[], None] | None]:
        """Run one step; its outputs, and how to run it again on the same tensors, if there is a
        short way.

        Once it is compiled, a step is recorded when it first runs with a capacity.
        """
        if self.how == "cuda graphs":
            return self._launched(function, inputs, fetch)
        key = self._key(function, inputs, fetch)
        variant, version = self.variants.get(key), self._version(key)
        in_place = all(tensor.is_cpu and tensor.is_contiguous() for tensor in inputs.values())
        if not isinstance(variant, Compiled) or version not in self.compiled or not in_place:
            return self.run(function, inputs, fetch), None
        arguments = self._arguments(function, inputs)
        sizes = tuple(tensor.shape for tensor in inputs.values())
        names = self._argument_names(function, frozenset(inputs))
        states = [self.states[name] for name in names if name in self.states]
        recorded = version, sizes, tuple(state.shape for state in states)
        with torch.no_grad():
            if recorded not in self.recordings:
                start = perf_counter()
                results, recording = record(variant, arguments, states)
                self.recordings[recorded] = recording
                self.preparing += perf_counter() - start
                return dict(zip(fetch, results, strict=True)), None
        found = self.recordings[recorded]
        if found is None:
            return self.run(function, inputs, fetch), None
        replay = Replay(found, [*arguments, *variant.weights])
        replay()
        return dict(zip(fetch, replay.results, strict=True)), replay

    def _launched(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> tuple[Outputs, Callable[[], None] | None]:
        """Run one step as a graph, once it is compiled."""
        key = self._key(function, inputs, fetch)
        if self._version(key) not in self.compiled:
            return self.run(function, inputs, fetch), None
        if self.captured_epoch != self.buffers.epoch:
            self.captured.clear()
            self.captured_epoch = self.buffers.epoch
        step = self.captured.get(key)
        if step is None:
            start = perf_counter()
            names = self._argument_names(function, frozenset(inputs))
            given = self.variants[key], names, self.states, inputs, fetch, self.device
            with torch.no_grad():
                step = self.captured[key] = CapturedStep(*given)
            self.preparing += perf_counter() - start
        step(inputs)
        return step.outputs, partial(step, inputs)

    def _key(
        self, function: str, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> object:
        """What a step is compiled for; an eager one serves all shapes."""
        if self.how == "eager":
            return function, tuple(fetch), len(inputs)
        free = self._open_axes(function, inputs)
        kinds = tuple(
            (
                name,
                value.dtype,
                *(-1 if axis in free[name] else n for axis, n in enumerate(value.shape)),
            )
            for name, value in inputs.items()
        )
        log = self.buffers.capacities.get(LOG)  # of one length in all that is compiled
        return function, tuple(fetch), kinds, log

    def _open_axes(
        self, function: str, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, frozenset[int]]:
        """Axes of the inputs of which the variant for them takes any size."""
        if function not in self.open_axes:
            found = OpenAxes(self.program.function(function), self.widths(function))
            self.open_axes[function] = found
        return self.open_axes[function].of(inputs)

    def _version(self, key: object) -> object:
        """What is compiled when it is first called: CUDA graphs for each length of the caches,
        code for the CPU for a number of threads."""
        if self.how == "cuda graphs":
            return key, tuple(self.buffers.capacities.values())
        return key, torch.get_num_threads()

    def _arguments(self, function: str, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        free = self._open_axes(function, inputs) if self.how == "inductor" else {}
        given = {name: tensor.to(self.device).contiguous() for name, tensor in inputs.items()}
        for name, axes in free.items():
            for axis in axes:
                any_size(given[name], axis)
        names = self._argument_names(function, frozenset(inputs))
        return [self.states[name] if name in self.states else given[name] for name in names]

    def _argument_names(self, function: str, given: frozenset[str]) -> list[str]:
        names = [str(node.target) for node in self.program.function(function).inputs]
        return [n for n in names if n in self.states or n in given]

    @traces
    def _compile(
        self, function: str, given: frozenset[str], fetch: Sequence[str]
    ) -> Callable[..., Any]:
        fn = self.lowered.function(function)
        missing = {str(n.target) for n in fn.inputs} - given - set(self.program.states)
        if not missing <= OPTIONAL:
            raise InputError(f"{function} also needs the inputs {', '.join(sorted(missing))}")
        # Products of few bits give a row the same bits in any company; so does what is beside them.
        alike = (self.rounds or fn.calls(*NATIVE)) and fn.role is Role.TARGET
        on_cpu = ALIKE_ROWS if alike else CPU_ROWS
        rows = ROWS | {"eager": {}, "inductor": on_cpu, "cuda graphs": GPU_ROWS}[self.how]
        states = list(self.program.states)
        module = emit(fn, self.weights, states, fetch, frozenset(missing), rows, device=self.device)
        for node in module.graph.find_nodes(op="get_attr"):
            tensor = getattr(module, str(node.target))
            self.tensors[tensor.data_ptr()] = tensor.nbytes
        self.code += len(module.code)
        if self.how == "eager":
            # Not the module itself: calls of modules are what a trace in another thread takes over.
            return module.forward
        return inductor(module) if self.how == "inductor" else for_gpu(module)


def _how(target: Target) -> str:
    """How steps run: not compiled, compiled for the CPU, or compiled for a GPU and recorded."""
    if target.backend == "eager":
        return "eager"
    return "inductor" if target.device == "cpu" else "cuda graphs"


def _rounded(bucket: int, doubling: bool, rows: int) -> int:
    """The capacity for so many rows: whole buckets, or if `doubling` a power of two of them."""
    buckets = -(-rows // bucket)
    return bucket * (1 << (buckets - 1).bit_length() if doubling else buckets)
