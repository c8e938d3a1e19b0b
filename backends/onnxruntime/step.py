"""One lowered function in one session: binds memory once a shape, then only copies inputs in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir import Function, InputError, Sym, TensorType, type_of
from .buffers import StateBuffers
from .emit import DTYPES, output_name

_WIDTH = Sym("T")


class Step:
    """A session, its buffers for inputs and outputs, and what they are bound to."""

    def __init__(self, function: Function, session: Any, states: StateBuffers) -> None:
        self.function, self.session, self.states = function, session, states
        self.binding = session.io_binding()
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
        self.outputs = {n: type_of(v) for n, v in outputs.items() if n not in states.tensors}
        self.targets = {name: output_name(function, name) for name in outputs}
        self.symbols = _symbols(self.inputs)
        self.memory: dict[str, torch.Tensor] = {}
        self.feeds: dict[str, torch.Tensor] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.key: Any = None

    def run(
        self, inputs: Mapping[str, torch.Tensor], fetch: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Outputs for inputs on the CPU. Errors: `InputError` for one that is missing or wrong."""
        try:
            key = [self.states.epoch, *[inputs[name].shape for name in self.inputs]]
        except KeyError as error:
            raise InputError(
                f"{self.function.name} needs the input {error.args[0]!r}: "
                f"{self.inputs[error.args[0]]}"
            ) from error
        if key != self.key:
            self._bind(inputs)
            self.key = key
        for name, buffer in self.feeds.items():
            buffer.copy_(inputs[name])
        self.session.run_with_iobinding(self.binding)
        return {name: self.results[name] for name in fetch}

    def first_column(self, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Results of a step of one token, out of those of a step of two."""
        return {name: self._first(name, tensor) for name, tensor in results.items()}

    def _first(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dims = self.outputs[name].dims
        return tensor.narrow(dims.index(_WIDTH), 0, 1) if _WIDTH in dims else tensor

    def _bind(self, inputs: Mapping[str, torch.Tensor]) -> None:
        sizes = {"B": self.states.batch, "C": self.states.capacity}
        sizes.update({s: inputs[name].shape[axis] for s, name, axis in self.symbols})
        for name, type in self.inputs.items():
            self.feeds[name] = self._buffer(name, _fitting(name, type, inputs[name], sizes))
            self._bind_input(name, self.feeds[name], "cpu")
        for name, type in self.outputs.items():
            self.results[name] = self._buffer(f"{name} out", type.bind(sizes))
            self._bind_output(self.targets[name], self.results[name], "cpu")
        for name in self.read:
            self._bind_input(name, self.states.tensors[name], self.states.device)
        for name in self.written:
            self._bind_output(self.targets[name], self.states.tensors[name], self.states.device)

    def _buffer(self, name: str, type: TensorType) -> torch.Tensor:
        """Memory of a type; the same memory for every shape that fits into it."""
        count = math.prod(type.shape)
        flat = self.memory.get(name)
        if flat is None or flat.numel() < count:
            flat = self.memory[name] = torch.empty(count, dtype=type.dtype)
        return flat[:count].view(type.shape)

    def _bind_input(self, name: str, tensor: torch.Tensor, device: str) -> None:
        kind, shape = int(DTYPES[tensor.dtype]), list(tensor.shape)
        self.binding.bind_input(name, device, 0, kind, shape, tensor.data_ptr())

    def _bind_output(self, name: str, tensor: torch.Tensor, device: str) -> None:
        kind, shape = int(DTYPES[tensor.dtype]), list(tensor.shape)
        self.binding.bind_output(name, device, 0, kind, shape, tensor.data_ptr())


def _symbols(inputs: Mapping[str, TensorType]) -> list[tuple[str, str, int]]:
    """(symbol, input, axis) for the first place where each symbol's size can be read."""
    found: dict[str, tuple[str, str, int]] = {}
    for name, type in inputs.items():
        for axis, dim in enumerate(type.dims):
            if isinstance(dim, Sym) and dim.text.isidentifier():
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
