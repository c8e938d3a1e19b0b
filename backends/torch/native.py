"""The kernels of `kernels/` as torch ops, which inductor calls and replays record.

They are compiled for this processor when first used (see `cached_library`). Those for weights of
few bits, which ONNX Runtime has, too, are in `native_quantized`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir import InputError
from ...ir.ops.operands import Operands
from ..cached_library import SHARED, Sources
from ..cached_library import library as library_of
from ..faults import EXPECTED

KERNELS = Sources("kernels", Path(__file__).with_name("kernels"), shared=SHARED.folder)

OUTSIDE = "lies outside"
"""What kernels say of an index."""

Argument = Tensor | float | None
"""Of a kernel: a tensor or None stands for its address, a floating number for that of a float32."""


def library() -> ctypes.CDLL:
    """The kernels that only torch calls, and what runs them all."""
    return library_of(KERNELS)


class Kernel:
    """A function of a library, called by its name."""

    def __init__(self, name: str, sources: Sources = KERNELS) -> None:
        self.name, self.sources = name, sources

    def __call__(self, *arguments: Argument) -> None:
        Run([(self.address, arguments)])()

    @property
    def address(self) -> int:
        """Where its code is."""
        return address_in(library_of(self.sources), self.name)


class Run:
    """Kernels, by their addresses, one after the other on certain arguments.

    It does not keep the tensors. Errors: `RuntimeError` for what a kernel throws, `InputError` for
    an index that lies outside.
    """

    def __init__(self, calls: Sequence[tuple[int, Sequence[Argument]]]) -> None:
        self._run = library().run
        self._run.restype = ctypes.c_char_p
        self._kept: list[Any] = []
        self._calls = (_Call * len(calls))()
        for call, (address, arguments) in zip(self._calls, calls, strict=True):
            assert len(arguments) <= most_arguments(), f"a kernel of {len(arguments)} arguments"
            numbers = (ctypes.c_int64 * len(arguments))(*map(self._number, arguments))
            call.function, call.arguments, call.count = address, numbers, len(arguments)
            self._kept.append(numbers)
        self._count = ctypes.c_int64(len(calls))

    def _number(self, argument: Argument) -> int:
        if isinstance(argument, Tensor):
            return argument.data_ptr()
        if isinstance(argument, float):
            self._kept.append(ctypes.c_float(argument))
            return ctypes.addressof(self._kept[-1])
        return argument or 0

    def __call__(self) -> None:
        thrown = self._run(self._calls, self._count)
        if thrown is not None:
            text = thrown.decode(errors="replace")
            raise InputError(f"{text}; {EXPECTED}") if OUTSIDE in text else RuntimeError(text)


class _Call(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_int64)),
        ("count", ctypes.c_int64),
    )


def most_arguments() -> int:
    """Arguments that a kernel in a `Run` may have."""
    most: int = library().most_arguments()
    return most


def address_in(library: ctypes.CDLL, name: str) -> int:
    """The address of a library's function."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address


float32_kernel = Kernel("linear_float32")
norm_kernel = Kernel("norm")
indices_kernel = Kernel("indices")
topk_kernel = Kernel("topk")

_LIBRARY = torch.library.Library("graftwork_native", "DEF")

OPS: dict[str, Callable[..., Any]] = {}
"""The native ops by name, as they are called."""


def native_op(
    schema: str, check: Callable[..., None], like: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the decorated function as the op of this schema on the CPU.

    check: what it and its shape rule ask of their operands before anything else: kernels get bare
    addresses, so whatever it lets through is read as rows in a row. like: results of its shape.
    What is registered is called with operands laid out in rows, by code that compilers trace: a
    copy that the op made itself would be missing from recordings of its kernels.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            _check_layout(name, arguments)
            check(*arguments)
            return function(*arguments)

        def fake(*arguments: Any) -> Any:
            _check_layout(name, arguments)
            check(*arguments)
            return like(*arguments)

        name = schema.partition("(")[0]
        _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
        _LIBRARY.impl(name, checked, "CPU")
        torch.library.register_fake(f"graftwork_native::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.graftwork_native, name).default

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return op(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])

        OPS[name] = call
        return call

    return register


def _check_layout(name: str, arguments: Sequence[Any]) -> None:
    """Whether operands lie where kernels can read them.

    Errors: `InputError` naming the operand's place, its device and strides.
    """
    tensors = [(place, a) for place, a in enumerate(arguments) if isinstance(a, Tensor)]
    device = tensors[0][1].device
    for place, tensor in tensors:
        if tensor.device != device or not tensor.is_contiguous():
            raise InputError(
                f"graftwork_native.{name}: operand {place} must be contiguous and on {device}, got "
                f"{tensor.dtype}{list(tensor.shape)} with strides {tensor.stride()} on "
                f"{tensor.device}"
            )


F32 = torch.float32


def _linear_like(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _check_linear(x: Tensor, weight: Tensor) -> None:
    given = Operands("linear_float32")
    given.fit_rows("x", x, "K", F32)
    given.fit("weight", weight, "NK", F32)


@native_op("linear_float32(Tensor x, Tensor weight) -> Tensor", _check_linear, _linear_like)
def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Products of rows f32[..., K] and weights f32[N,K], f32[..., N]."""
    result = _linear_like(x, weight)
    float32_kernel(x, weight, result, *_sizes(x, weight), torch.get_num_threads())
    return result


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    return x.shape[:-1].numel(), weight.shape[0], weight.shape[1]


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _two_like(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _check_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    given = Operands("norm")
    given.fit_rows("x", x, "H", F32)
    given.fit("weight", weight, "H", F32)
    given.fit("bias", bias, "H", F32)
    if residual is not None and (residual.dtype, residual.shape) != (F32, x.shape):
        raise InputError(
            f"norm: residual must be {F32}{list(x.shape)} as x is, got "
            f"{residual.dtype}{list(residual.shape)}"
        )


def _check_rms(x: Tensor, weight: Tensor, eps: float) -> None:
    _check_norm(x, weight)


@native_op("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _check_rms, _like)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`graftwork.rms_norm` in float32, weight f32[H]."""
    return _norm(x, weight, eps)


def _check_add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    _check_norm(x, weight, residual=residual)


@native_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _check_add_rms,
    _two_like,
)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`graftwork.add_rms_norm` in float32, x and residual of one shape, weight f32[H]."""
    total = torch.empty_like(x)
    return _norm(x, weight, eps, residual=residual, total=total), total


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    _check_norm(x, weight, bias)


@native_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor", _check_layer, _like
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`graftwork.layer_norm` in float32."""
    return _norm(x, weight, eps, bias=bias, centered=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    centered: bool = False,
) -> Tensor:
    result = torch.empty_like(x)
    sizes = x.shape[:-1].numel(), x.shape[-1]
    tensors = x, residual, weight, bias, total, result
    norm_kernel(*tensors, *sizes, centered, eps, torch.get_num_threads())
    return result


def _check_indices(x: Tensor, first: int, last: int) -> None:
    if x.dtype != torch.int64:
        raise InputError(f"indices: the kernel takes {torch.int64}, got {x.dtype}")


@native_op("indices(Tensor x, SymInt first, SymInt last) -> Tensor", _check_indices, _like)
def indices(x: Tensor, first: int, last: int) -> Tensor:
    """The indices i64[...] themselves. Errors: `InputError` if one is not in first..last."""
    result = torch.empty_like(x)
    indices_kernel(x, result, x.numel(), first, last)
    return result


def _check_topk(x: Tensor, count: int) -> None:
    Operands("topk").fit_rows("x", x, "N", F32)
    if not 1 <= count <= x.shape[-1]:
        raise InputError(f"topk: expected 1 to N values of rows of N={x.shape[-1]}, got {count}")


def _topk_like(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@native_op("topk(Tensor x, SymInt count) -> (Tensor, Tensor)", _check_topk, _topk_like)
def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of rows f32[..., N], the largest first, of equal ones the first,
    and their places i64[..., count]."""
    values, places = _topk_like(x, count)
    sizes = x.shape[:-1].numel(), x.shape[-1], count
    topk_kernel(x, values, places, *sizes, torch.get_num_threads())
    return values, places
