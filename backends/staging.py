"""Inputs and outputs on another device than the host's memory.

ONNX Runtime reads what is bound when it is bound, not when a session runs, and a CUDA graph knows
addresses of the device alone: inputs of host memory that are written again later are never seen. So
inputs have a place in one piece of the device's memory, and each run copies one piece of pinned
memory over it. Outputs stay on the device but for those that are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..ir import TensorType

ALIGNED = 256
"""Bytes at whose multiples inputs begin."""


class Stream:
    """What an executable's work on a device is queued in, kernels of sessions and moves of rows
    alike, so that each sees what the one before has done. On the CPU everything is done at once.

    own: whether it is one of its own, not the one that torch uses by itself.
    """

    def __init__(self, device: torch.device, *, own: bool = True) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if own and device.type == "cuda" else None

    @property
    def handle(self) -> str | None:
        """The stream as ONNX Runtime takes it. (It takes 0, torch's own first one, as none.)"""
        return None if self._stream is None else str(self._stream.cuda_stream)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What torch is told to do meanwhile is queued in it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Return when all that is queued is done."""
        if self._stream is not None:
            self._stream.synchronize()
        elif self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class Staging:
    """Pinned memory and a device's for inputs of certain types, and pinned memory for outputs.

    bound: the inputs where they are read. results: the outputs that were asked for.
    """

    def __init__(
        self,
        types: Mapping[str, TensorType],
        outputs: Mapping[str, torch.Tensor],
        device: torch.device,
        stream: Stream,
    ) -> None:
        self.outputs, self.stream = outputs, stream
        self.pinned = device.type == "cuda"
        offsets, size = {}, 0
        for name, type in types.items():
            offsets[name] = size
            size += -(-math.prod(type.shape) * type.dtype.itemsize // ALIGNED) * ALIGNED
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        self.there = torch.empty(size, dtype=torch.uint8, device=device)
        self.given = {n: _view(self.host, offsets[n], type) for n, type in types.items()}
        self.bound = {n: _view(self.there, offsets[n], type) for n, type in types.items()}
        self.results: dict[str, torch.Tensor] = {}

    def upload(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Put inputs where they are read, by one copy."""
        for name, place in self.given.items():
            place.copy_(inputs[name])
        with self.stream.current():
            self.there.copy_(self.host, non_blocking=True)

    def download(self, fetch: Collection[str]) -> dict[str, torch.Tensor]:
        """Outputs in the host's memory: the same each time, as long as the same are asked for."""
        with self.stream.current():
            for name in fetch:
                output = self.outputs[name]
                if name not in self.results:
                    self.results[name] = torch.empty(
                        output.shape, dtype=output.dtype, pin_memory=self.pinned
                    )
                self.results[name].copy_(output, non_blocking=True)
        self.stream.wait()
        return {name: self.results[name] for name in fetch}


def _view(flat: torch.Tensor, offset: int, type: TensorType) -> torch.Tensor:
    shape: Sequence[int] = type.shape
    size = math.prod(shape) * type.dtype.itemsize
    return flat[offset : offset + size].view(type.dtype).view(*shape)
