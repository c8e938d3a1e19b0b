"""The kernels of `kernels/` as torch ops, which inductor calls and replays record.

They are compiled for this processor when first used (see `cached_library`). Those for weights of
few bits, which ONNX Runtime has, too, are in `native_quantized`.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ir import InputError
from ...ir.ops import OpDef, all_ops
from ...ir.ops.operands import Operands
from ..cached_library import SHARED, Sources
from ..cached_library import library as library_of
from ..faults import EXPECTED
from ..own_kernels import entries, floats, own_ops, zero_of

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

    watched: ClassVar[Callable[[Kernel, Sequence[Argument]], None] | None] = None
    """What is told of all calls before they are made."""

    def __init__(self, name: str, sources: Sources = KERNELS) -> None:
        self.name, self.sources = name, sources

    def __call__(self, *arguments: Argument) -> None:
        if Kernel.watched is not None:
            Kernel.watched(self, arguments)
        Run([(self.address, arguments)])()

    @functools.cached_property
    def address(self) -> int:
        """Where its code is."""
        return address_in(library_of(self.sources), self.name)


class OwnKernel(Kernel):
    """The kernel of graftwork's op of a name, see `kernels/door.h`."""

    @functools.cached_property
    def address(self) -> int:
        """Where its code is."""
        return entries(self.name).with_threads


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
        # Whole numbers first: most are, and asking torch what is a tensor takes longest.
        if argument is None or isinstance(argument, int):
            return int(argument or 0)
        if isinstance(argument, float):
            self._kept.append(ctypes.c_float(argument))
            return ctypes.addressof(self._kept[-1])
        return argument.data_ptr()

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

F32 = torch.float32
_LIBRARY = torch.library.Library("graftwork_native", "DEF")

OPS: dict[str, Callable[..., Any]] = {}
"""The native ops by name, as they are called."""


def native_op(
    made: Callable[..., Any], arguments: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Define the op of the decorated function's name on the CPU; the function writes its results.

    made: what the op returns, without values. It checks the operands first: kernels get bare
    addresses, so whatever it lets through is read as rows in a row. The function gets that and the
    operands. arguments: the schema without the name; None: that of `made`. What is registered is
    called with operands laid out in rows, by code that compilers trace: a copy that the op made
    itself would be missing from recordings of its kernels.
    """

    def register(function: Callable[..., None]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            results = fake(*arguments)
            function(results, *arguments)
            return results

        def fake(*arguments: Any) -> Any:
            _check_layout(name, arguments)
            return made(*arguments)

        name = function.__name__
        schema = arguments or torch.library.infer_schema(made, mutates_args=())
        return functools.wraps(function)(_entered(name, schema, run, fake))

    return register


def _entered(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """A native op, as it is called. schema: without the name."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"graftwork_native::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.graftwork_native, name).default

    def call(*arguments: Any) -> Any:
        return op(*[a.contiguous() if isinstance(a, Tensor) else a for a in arguments])

    OPS[name] = call
    return call


def checks(op: OpDef) -> Callable[..., Operands]:
    """The sizes of the operands of a native op that does what graftwork's does: it takes the same
    arguments in one order, all of them, and floating ones in float32. Errors: `InputError`."""
    declared = op.declared
    places = [declared.names.index(name) for name in floats(op)]

    def check(*operands: Any) -> Operands:
        given = declared.check(*operands)
        for place in places:
            operand = operands[place]
            if operand is not None and operand.dtype != F32:
                raise InputError(f"{op.name}: the kernel takes {F32}, got {operand.dtype}")
        return given

    return check


def arguments_of(op: OpDef) -> str:
    """The schema of such an op without the name."""
    _, arguments = op.declared.schema.split("(", 1)
    return "(" + re.sub(r"=[^,)]+", "", arguments.replace("*, ", ""))


def twin(
    name: str, also: Callable[[Operands], None] | None = None
) -> tuple[Callable[..., Any], str]:
    """Results and arguments of the native op that does what graftwork's op of this name does.
    also: what else it asks."""
    op = all_ops()[name]
    check = checks(op)

    def made(*operands: Any) -> Any:
        given = check(*operands)
        if also is not None:
            also(given)
        return op.declared.like(given, *operands)

    return made, arguments_of(op)


def _own(op: OpDef, sizes: str) -> None:
    """The native op of graftwork's op, which says how its kernel is called."""
    kernel, check, like = OwnKernel(op.name), checks(op), op.declared.like
    zeros = list(zero_of(op).values())
    count = len(op.declared.names) - len(zeros)

    def run(*operands: Any) -> Any:
        _check_layout(op.name, operands)
        given = check(*operands)
        results = like(given, *operands)
        made = results if isinstance(results, tuple) else (results,)
        numbers = [given.sizes.get(axis, 0) for axis in sizes]
        how = [value or zero for value, zero in zip(operands[count:], zeros, strict=True)]
        kernel(*operands[:count], *made, *numbers, *how, torch.get_num_threads())
        return results

    def fake(*operands: Any) -> Any:
        _check_layout(op.name, operands)
        return like(check(*operands), *operands)

    _entered(op.name, arguments_of(op), run, fake)


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


def _linear(x: Tensor, weight: Tensor, alike: bool = False) -> Tensor:
    given = Operands("linear_float32")
    given.fit_rows("x", x, "K", F32)
    given.fit("weight", weight, "NK", F32)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@native_op(_linear)
def linear_float32(result: Tensor, x: Tensor, weight: Tensor, alike: bool = False) -> None:
    """Products of rows f32[..., K] and weights f32[N,K], f32[..., N]. alike: a row has the same
    bits among many as among a few, which is slower for many."""
    sizes = x.shape[:-1].numel(), weight.shape[0], weight.shape[1]
    float32_kernel(x, weight, result, *sizes, int(alike), torch.get_num_threads())


def _per_column(given: Operands) -> None:
    if given.sizes["W"] != given.sizes["H"]:
        raise InputError(f"{given.op}: the kernel takes a weight [H]; {given.known()}")


@native_op(*twin("rms_norm", _per_column))
def rms_norm(result: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """`graftwork.rms_norm` in float32, weight f32[H]."""
    _norm(result, x, weight, eps)


@native_op(*twin("add_rms_norm", _per_column))
def add_rms_norm(
    results: tuple[Tensor, Tensor], x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> None:
    """`graftwork.add_rms_norm` in float32, weight f32[H]."""
    _norm(results[0], x, weight, eps, residual=residual, total=results[1])


@native_op(*twin("layer_norm"))
def layer_norm(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """`graftwork.layer_norm` in float32."""
    _norm(result, x, weight, eps, bias=bias, centered=True)


def _norm(
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    total: Tensor | None = None,
    centered: bool = False,
) -> None:
    sizes = x.shape[:-1].numel(), x.shape[-1]
    tensors = x, residual, weight, bias, total, result
    norm_kernel(*tensors, *sizes, centered, eps, torch.get_num_threads())


def _indices(x: Tensor, first: int, last: int) -> Tensor:
    if x.dtype != torch.int64:
        raise InputError(f"indices: the kernel takes {torch.int64}, got {x.dtype}")
    return torch.empty_like(x)


@native_op(_indices)
def indices(result: Tensor, x: Tensor, first: int, last: int) -> None:
    """The indices i64[...] themselves. Errors: `InputError` if one is not in first..last."""
    indices_kernel(x, result, x.numel(), first, last)


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    Operands("topk").fit_rows("x", x, "N", F32)
    if not 1 <= count <= x.shape[-1]:
        raise InputError(f"topk: expected 1 to N values of rows of N={x.shape[-1]}, got {count}")
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@native_op(_topk)
def topk(results: tuple[Tensor, Tensor], x: Tensor, count: int) -> None:
    """The `count` largest values of rows f32[..., N], the largest first, of equal ones the first,
    and their places i64[..., count]."""
    sizes = x.shape[:-1].numel(), x.shape[-1], count
    topk_kernel(x, *results, *sizes, torch.get_num_threads())


def _softmax(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@native_op(_softmax)
def softmax(result: Tensor, x: Tensor) -> None:
    """Softmax over the last axis [...,N]. Compiled loops take the end of a row, where N is no
    multiple of a vector, by another exp than its beginning, and not the same end for every number
    of rows; torch's own takes each row alike."""
    torch.softmax(x, -1, out=result)


for _op in own_ops():
    if _op.native is not None:
        _own(_op, _op.native.sizes)
