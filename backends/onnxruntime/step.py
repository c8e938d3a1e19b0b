"""One lowered function in one session: binds memory once a shape, then only copies inputs in."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...ir import Function, InputError, Sym, TensorType, type_of
from ...ir.support.errors import execution_error
from ..faults import index_fault
from ..staging import Staging, Stream
from ..states import StateBuffers
from .attention import TOTAL
from .emit import DTYPES, output_name
from .recurrent_states import is_written_in_place
from .session import as_graph, giving_back, records_graphs

_WIDTH = Sym("T")

BOUND = 64
"""Combinations of input shapes that stay bound in a session: trees and drafts come in a few dozen
widths, prompts in all lengths. One takes some 50 kB."""

WIDE = 256
"""Tokens of a run after which the session gives back its memory: of prompts, and of batches of
trees, whose computation is much longer than memory takes to come again."""


@dataclass(frozen=True)
class _Feed:
    """Where an input is copied to."""

    name: str
    buffer: torch.Tensor
    address: int
    nbytes: int

    def take(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of the buffer's shape in. Plain memory moves cost a tenth of what a torch
        op does, whose code a model's run has pushed out of the processor's caches."""
        plain = tensor.dtype is self.buffer.dtype and tensor.is_cpu and tensor.is_contiguous()
        if plain:
            ctypes.memmove(self.address, tensor.data_ptr(), self.nbytes)
        else:
            self.buffer.copy_(tensor)


@dataclass(frozen=True)
class Bound:
    """A binding for inputs of certain shapes. feeds: what must be copied in, or is there, in the
    host's memory. staging: what else goes to another device, and what comes back. updates: states,
    and what they become when all that reads them has done so. how: options of its runs."""

    binding: Any
    feeds: tuple[_Feed, ...]
    outputs: dict[str, torch.Tensor]
    staging: Staging | None = None
    updates: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    how: Any = None

    def results(self, fetch: Sequence[str]) -> dict[str, torch.Tensor]:
        """Outputs of the last run, in the host's memory."""
        if self.staging is not None:
            return self.staging.download(fetch)
        return {name: self.outputs[name] for name in fetch}


class SessionMemory:
    """A session's memory for inputs and outputs, and which of its steps are bound to it: one runs
    at a time, on whichever states. flat: by the input's or output's name."""

    def __init__(self) -> None:
        self.flat: dict[str, torch.Tensor] = {}
        self._used: OrderedDict[tuple[weakref.ref[Step], Any], None] = OrderedDict()

    def note(self, step: Step, shapes: Any) -> None:
        """A step used what it is bound to for these shapes; what was used longest ago is forgotten
        where there is too much."""
        key = weakref.ref(step), shapes
        self._used[key] = None
        self._used.move_to_end(key)
        if len(self._used) > BOUND:
            self._forget(*self._used.popitem(last=False)[0])

    def clear(self) -> None:
        """Nothing is bound any more."""
        while self._used:
            self._forget(*self._used.popitem()[0])

    @staticmethod
    def _forget(owner: weakref.ref[Step], shapes: Any) -> None:
        if (step := owner()) is not None:
            step.bound.pop(shapes, None)


class Step:
    """A session, its buffers for inputs and outputs, and what they are bound to.

    stream: where the session's device is another than the host's memory, what it works in.
    records: whether steps on bound memory are recorded as graphs (`session.records_graphs`); what
    they read in the host's memory, `total`, is then as it was when they were. memory: for inputs
    and outputs, shared with steps of the session on other states.
    """

    def __init__(
        self,
        function: Function,
        session: Any,
        states: StateBuffers,
        stream: Stream | None = None,
        memory: SessionMemory | None = None,
    ) -> None:
        self.function, self.session, self.states = function, session, states
        self.stream = stream
        self.records = records_graphs(session)
        self.recorded = 0
        self.inputs: dict[str, TensorType] = {}
        self.read: list[str] = []
        taken = {value.name for value in session.get_inputs()}
        for node in function.inputs:
            name = str(node.target)
            if name not in taken:
                continue
            if name in states.tensors:
                self.read.append(name)
            else:
                self.inputs[name] = type_of(node)
        outputs = function.outputs
        self.written = [name for name in outputs if name in states.tensors]
        rewritten = [name for name in self.written if name in states.rewritten]
        self.beside = {name for name in rewritten if not is_written_in_place(function, name)}
        self.outputs = {n: type_of(v) for n, v in outputs.items() if n not in states.tensors}
        self.targets = {name: output_name(function, name) for name in outputs}
        self.symbols = _symbols(self.inputs)
        self.memory = memory or SessionMemory()
        self.bound: dict[Any, Bound] = {}
        self.epoch = states.epoch

    def run(
        self, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Outputs for inputs on the CPU. Errors: `InputError` for one that is missing or wrong."""
        try:
            shapes = tuple([inputs[name].shape for name in self.inputs])
        except KeyError as error:
            raise InputError(
                f"{self.function.name} needs the input {error.args[0]!r}: "
                f"{self.inputs[error.args[0]]}"
            ) from error
        if self.epoch != self.states.epoch:
            self.bound.clear()
            self.epoch = self.states.epoch
        bound = self.bound.get(shapes)
        if bound is None:
            bound = self.bind(inputs)
            self.bound[shapes] = bound
        self.memory.note(self, shapes)
        for feed in bound.feeds:
            feed.take(inputs[feed.name])
        self.go(bound, inputs)
        return bound.results(fetch)

    def go(self, bound: Bound, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run on what is in bound memory, and on inputs that have yet to go to the device.

        Errors: `ExecutionError` with what the runtime says.
        """
        if bound.staging is not None:
            bound.staging.upload(inputs)
        try:
            self.session.run_with_iobinding(bound.binding, bound.how)
        except Exception as error:  # the library's error types are not public
            raise index_fault(error, self.function.name) or execution_error(
                self.function.name, error
            ) from error
        if bound.updates:
            with self.states.queued():
                for state, new in bound.updates:
                    state.copy_(new)

    def first_column(self, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results of a step of one token, out of those of a step of two."""
        return {name: self._first(name, tensor) for name, tensor in results.items()}

    def _first(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dims = self.outputs[name].dims
        return tensor.narrow(dims.index(_WIDTH), 0, 1) if _WIDTH in dims else tensor

    def bind(self, inputs: Mapping[str, torch.Tensor], copy: bool = True) -> Bound:
        """Bind memory for inputs of these shapes, or with `copy` off the inputs' own memory, which
        must be on the CPU and contiguous. Errors: `InputError` for an input of another type.
        """
        sizes = self.states.sizes
        sizes.update({s: inputs[name].shape[axis] for s, name, axis in self.symbols})
        types = {n: _fitting(n, t, inputs[n], sizes) for n, t in self.inputs.items()}
        results = {f"{n} out": t.bind(sizes) for n, t in self.outputs.items()}
        staged = {} if self.stream is None else {n: t for n, t in types.items() if n != TOTAL}
        plain = {name: type for name, type in types.items() if name not in staged}
        self._reserve({**plain, **results} if copy else results)
        binding, feeds = self.session.io_binding(), []
        for name, type in plain.items():
            buffer = self._buffer(name, type) if copy else inputs[name]
            feeds.append(_Feed(name, buffer, buffer.data_ptr(), buffer.nbytes))
            _bind(binding.bind_input, name, buffer, "cpu")
        outputs = {
            name: self._buffer(f"{name} out", results[f"{name} out"]) for name in self.outputs
        }
        where = "cpu" if self.stream is None else self.states.device.type
        for name, buffer in outputs.items():
            _bind(binding.bind_output, self.targets[name], buffer, where)
        staging = None
        if self.stream is not None:
            staging = Staging(staged, outputs, self.states.device, self.stream)
            for name, tensor in staging.bound.items():
                _bind(binding.bind_input, name, tensor, where)
        for name in self.read:
            _bind(binding.bind_input, name, self.states.tensors[name], self.states.device.type)
        updates = []
        for name in self.written:
            state = self.states.tensors[name]
            if name in self.beside:  # the runtime may write it before all has been read
                updates.append((state, self.states.spare(name)))
                state = updates[-1][1]
            _bind(binding.bind_output, self.targets[name], state, self.states.device.type)
        wide = self.stream is None and sizes.get("B", 1) * sizes.get("T", 1) >= WIDE
        how = giving_back() if wide and not self.records else None
        again = self.records and not copy  # on the same memory: a graph, with a number of its own
        self.recorded += again
        if self.records:
            how = as_graph(self.recorded if again else None)
        bound = Bound(binding, tuple(feeds), outputs, staging, tuple(updates), how)
        if again:
            release = self.session.release_captured_graph
            weakref.finalize(bound, release, self.recorded).atexit = False
        return bound

    def _reserve(self, types: Mapping[str, TensorType]) -> None:
        """Memory for all of these; what is bound to memory that is too small is forgotten.

        It grows at least twofold: held calls keep what they were bound to, and all that is kept
        must not add up to more than what there is now.
        """
        for name, type in types.items():
            count = math.prod(type.shape)
            flat = self.memory.flat.get(name)
            if flat is None or flat.numel() < count:
                self.memory.clear()
                grown = 0 if flat is None else 2 * flat.numel()
                device = self.states.device if name.endswith(" out") else None
                self.memory.flat[name] = torch.empty(
                    max(count, grown), dtype=type.dtype, device=device
                )

    def _buffer(self, name: str, type: TensorType) -> torch.Tensor:
        """Memory of a type; the same memory for every shape, because one runs at a time."""
        return self.memory.flat[name][: math.prod(type.shape)].view(type.shape)


def _bind(bind: Any, name: str, tensor: torch.Tensor, device: str) -> None:
    kind, shape = int(DTYPES[tensor.dtype]), list(tensor.shape)
    bind(name, device, 0, kind, shape, tensor.data_ptr())


def _symbols(inputs: Mapping[str, TensorType]) -> list[tuple[str, str, int]]:
    """(symbol, input, axis) for the first place where each symbol's size can be read."""
    found: dict[str, tuple[str, str, int]] = {}
    for name, type in inputs.items():
        for axis, dim in enumerate(type.dims):
            if isinstance(dim, Sym) and dim.plain:
                found.setdefault(dim.text, (dim.text, name, axis))
    return list(found.values())


def _fitting(
    name: str, type: TensorType, tensor: torch.Tensor, sizes: Mapping[str, int]
) -> TensorType:
    """The input's concrete type. Errors: `InputError` if the tensor has another."""
    bound = type.bind(sizes)
    if TensorType.of(tensor) != bound:
        raise InputError(
            f"input {name!r}: expected {type} with {dict(sizes)}, got {TensorType.of(tensor)}"
        )
    return bound
