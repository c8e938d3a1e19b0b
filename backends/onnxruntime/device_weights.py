"""Weights on a device, once for all sessions that use them.

A session copies a model's initializers to its device, each session its own; one that is given a
value in the device's memory under an initializer's name uses that in place. What the runtime's
optimizer makes of initializers before, and what it wants in the host's memory, it takes from the
file as without.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as oir
import torch

from ...ir import Weight
from .emit import DTYPES
from .store import INLINE


class DeviceWeights:
    """Values by the weights' names, made when they are first asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, Any] = {}

    def of(self, pending: tuple[tuple[oir.Value, Weight], ...]) -> dict[str, Any]:
        """The runtime's values for what a model's large initializers stand for, by their names."""
        return {
            str(value.name): self._value(weight)
            for value, weight in pending
            if weight.type.nbytes > INLINE and _is_plain(value, weight)
        }

    def _value(self, weight: Weight) -> Any:
        import onnxruntime as ort

        if weight.name not in self._values:
            tensor = weight.load().to(self.device).contiguous()
            self.tensors[weight.name] = tensor
            self._values[weight.name] = ort.OrtValue.from_dlpack(tensor)
        return self._values[weight.name]


def _is_plain(value: oir.Value, weight: Weight) -> bool:
    """Whether torch and the runtime mean the same by the bytes: not by nibbles, nor by booleans,
    which the way between the two does not know."""
    dtype = weight.type.dtype
    return dtype != torch.bool and value.dtype in (None, DTYPES[dtype])
