"""Checks of an op's operands, shared by its meaning, its fake kernel and native kernels.

Checking all sizes keeps ops from reading beyond their operands.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from ..support.errors import InputError
from ..types import DTYPE_NAMES


class Operands:
    """Sizes of an op's axes by letter, collected from its operands in order."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {"1": 1}

    def fit(
        self, name: str, tensor: Tensor | None, axes: str, dtype: torch.dtype | None = None
    ) -> None:
        """Check an operand (None: absent, which fits).

        axes: a letter each, equal letters for equal sizes, 1 for a size of 1. dtype: None for any
        floating one. Errors: `InputError` with expected and given type.
        """
        if tensor is None:
            return
        shape, sizes = tensor.shape, self.sizes
        if len(shape) != len(axes):
            self.refuse(name, tensor, axes, dtype)
        for axis, size in zip(axes, shape, strict=True):
            if size != sizes.setdefault(axis, size):
                self.refuse(name, tensor, axes, dtype)
        if not _is(tensor, dtype):
            self.refuse(name, tensor, axes, dtype)

    def fit_rows(
        self, name: str, tensor: Tensor, axis: str, dtype: torch.dtype | None = None
    ) -> None:
        """Check the last axis and the dtype of an operand."""
        shape = tensor.shape
        fits = shape and shape[-1] == self.sizes.setdefault(axis, shape[-1])
        if not fits or not _is(tensor, dtype):
            self.refuse(name, tensor, f".{axis}", dtype)

    def fit_like(
        self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype | None = None
    ) -> None:
        """Check an operand's shape and dtype."""
        if tensor.shape != shape or not _is(tensor, dtype):
            self.refuse(name, tensor, map(str, shape), dtype)

    def lacks(self, **tensors: Tensor | None) -> NoReturn:
        """Raise the error about a required operand that is None."""
        missing = [name for name, tensor in tensors.items() if tensor is None]
        raise InputError(f"{self.op}: {missing[0]} is missing")

    def positive(self, name: str, value: int | None) -> None:
        """Check that a size or an option, if given, is at least 1."""
        if value is not None and value < 1:
            raise InputError(f"{self.op}: {name} must be at least 1, got {value}; {self.known()}")

    def multiple(self, axis: str, of: str) -> None:
        """Check that a size is a multiple of another, which is not 0."""
        self.positive(of, self.sizes[of])
        if self.sizes[axis] % self.sizes[of] != 0:
            raise InputError(f"{self.op}: {axis} must be a multiple of {of}; {self.known()}")

    def refuse(
        self, name: str, tensor: Tensor, axes: Iterable[str], dtype: torch.dtype | None = None
    ) -> NoReturn:
        """Raise the error about an operand."""
        kind = "floating " if dtype is None else _name(dtype)
        wanted = ",".join("..." if axis == "." else axis for axis in axes)
        raise InputError(
            f"{self.op}: {name} must be {kind}[{wanted}], "
            f"got {_name(tensor.dtype)}{list(tensor.shape)}; {self.known()}"
        )

    def known(self) -> str:
        sizes = [f"{axis}={size}" for axis, size in self.sizes.items() if axis != "1"]
        return "here " + ", ".join(sizes)


def _is(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    return tensor.dtype.is_floating_point if dtype is None else tensor.dtype == dtype


def _name(dtype: torch.dtype) -> str:
    return DTYPE_NAMES.get(dtype, str(dtype))
