"""What a step returned, and reading it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Outputs(dict[str, torch.Tensor]):
    """Outputs of a step by name; the same object again where the next step's lie in their place.

    So whatever is made of the tensors to read them is made once.
    """

    __slots__ = ("_arrays", "_views")

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._views: dict[str, Any] = {}
        self._arrays: dict[str, npt.NDArray[np.float32]] = {}

    def integers(self, name: str) -> Any:
        """An output i64[B,S,...] as lists. Its memory is read: torch takes 50 us after a step."""
        view: Any = self._views.get(name)
        if view is None:
            view = self._views[name] = self[name].cpu().numpy().data
        return view.tolist()

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """An output f[B,...] as numpy's, in float32; its memory is read where that is possible."""
        value = self[name]
        if value.dtype != torch.float32 or value.device.type != "cpu":
            return value.float().cpu().numpy()
        array: npt.NDArray[np.float32] | None = self._arrays.get(name)
        if array is None:
            array = self._arrays[name] = value.numpy()
        return array


def integers(outputs: Mapping[str, torch.Tensor], name: str) -> list[list[int]]:
    """An output i64[B,S] of any kind of run as lists."""
    found: list[list[int]] = (
        outputs.integers(name) if isinstance(outputs, Outputs) else outputs[name].tolist()
    )
    return found
