"""Whether an op's operands fit each other, asked alike by its meaning, its shape rule and kernels.

A shape rule that only multiplies sizes would let programs through whose ops then read beyond their
operands, or whose backends disagree about what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from ..support.errors import InputError
from ..types import DTYPE_NAMES


class Operands:
    """The sizes of an op's axes, as its operands name them one after the other."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {"1": 1}

    def fit(
        self, name: str, tensor: Tensor | None, axes: str, dtype: torch.dtype | None = None
    ) -> None:
        """Check an operand (None: absent, which fits).

        axes: a letter each, equal letters for equal sizes, 1 for a size of 1. dtype: None for any
        floating one. Errors: `InputError` with what the op takes and what came.
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
        """Check an operand of which only the last axis is named, whatever is before it."""
        shape = tensor.shape
        fits = shape and shape[-1] == self.sizes.setdefault(axis, shape[-1])
        if not fits or not _is(tensor, dtype):
            self.refuse(name, tensor, f".{axis}", dtype)

    def fit_like(
        self, name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype | None = None
    ) -> None:
        """Check an operand that has the shape of another one."""
        if tensor.shape != shape or not _is(tensor, dtype):
            self.refuse(name, tensor, map(str, shape), dtype)

    def lacks(self, **tensors: Tensor | None) -> NoReturn:
        """Raise the error about an operand that is None and must not be."""
        missing = [name for name, tensor in tensors.items() if tensor is None]
        raise InputError(f"{self.op}: {missing[0]} is missing")

    def at_least_one(self, *axes: str) -> None:
        """Check that named axes have elements."""
        for axis in axes:
            if self.sizes[axis] < 1:
                raise InputError(f"{self.op}: {axis} must be at least 1; {self.known()}")

    def multiple(self, axis: str, of: str) -> None:
        """Check that one named size is a multiple of another, which is not 0."""
        self.at_least_one(of)
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
