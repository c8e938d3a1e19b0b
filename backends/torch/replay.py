"""A compiled step's kernels once more, without the Python between them.

Inductor's code allocates and views some hundred tensors a layer before it calls a kernel, which
takes longer than a small layer's arithmetic. For inputs of given shapes it does the same each time:
what a step is cannot depend on what is in its tensors. So its kernel calls are recorded once, and
made again in memory that is laid out as it was.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...ir.support.threads import traces
from . import native
from .compiled import Compiled

ALIGNED = 64
"""Bytes at whose multiples torch allocates, and kernels may expect tensors to begin."""

COPIED = 1 << 29
"""Bytes of states that a recording may copy. A step that reads more takes so long that the Python
between its kernels does not matter."""


FILLS = (0xFF, 0)
"""What scratch is full of when a recording is tried: NaN, which shows in floats whatever is done
with it, but true as a boolean, and zeros, which are false. What no kernel wrote must not pass."""


WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


class Given(NamedTuple):
    """A place in the memory of an argument, or a weight, in bytes from its first element."""

    number: int
    offset: int


class Scratch(NamedTuple):
    """A place in the memory of what a step works out, in bytes from its beginning."""

    offset: int


Place = Given | Scratch


class Result(NamedTuple):
    """A tensor that a step returned."""

    place: Place
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


Kernel = Callable[..., None]


@dataclass(frozen=True)
class Recording:
    """The kernel calls of a step.

    calls: where a kernel's code is, and the places, or plain numbers, that it was given. size:
    bytes of scratch.
    """

    calls: list[tuple[int, list[Any]]]
    results: list[Result]
    size: int


class Replay:
    """A recording for certain arguments. Calling it is the step.

    results: the tensors that the step returned, anew each time in the same memory.
    """

    def __init__(self, recording: Recording, arguments: Sequence[Tensor]) -> None:
        self.scratch = torch.empty(recording.size + ALIGNED, dtype=torch.uint8)
        start = -self.scratch.data_ptr() % ALIGNED
        bases = [(t.untyped_storage(), t.storage_offset() * t.itemsize) for t in arguments]
        scratch = (self.scratch.untyped_storage(), start)
        # Calls know addresses alone.
        self.memory = [storage for storage, _ in bases]
        addresses = [tensor.data_ptr() for tensor in arguments]

        def tensor(place: Place, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
            storage, begin = scratch if isinstance(place, Scratch) else bases[place.number]
            offset = (begin + place.offset) // dtype.itemsize
            return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)

        def argument(value: Any) -> Any:
            if isinstance(value, Given):
                return addresses[value.number] + value.offset
            if isinstance(value, Scratch):
                return self.scratch.data_ptr() + start + value.offset
            return value

        calls = [(address, list(map(argument, args))) for address, args in recording.calls]
        self.run = native.Run(calls)
        self.results = [tensor(*result) for result in recording.results]

    def __call__(self) -> None:
        """Run the step on what is in its arguments now."""
        self.run()


@traces
def record(
    step: Compiled, arguments: Sequence[Tensor], states: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Recording | None]:
    """Run a compiled step; its results, and how to make them again from its arguments and weights.

    states: those of the arguments that it changes. None where the step is more than its kernels,
    such as calls of a library: the recording is tried on the states before, with scratch full of
    `FILLS`, and everything that the step returns or changes must come out as the same bits. None,
    too, for more than `COPIED` bytes of states, and where arguments share memory: other ones may
    not.
    """
    spans = _spans(arguments)
    shared = any(span.end > after.begin for span, after in itertools.pairwise(spans))
    if shared or sum(state.nbytes for state in states) > COPIED:
        return step(*arguments), None
    given = [*arguments, *step.weights]
    before = [state.clone() for state in states]
    with _kernel_calls() as seen:
        results = step(*arguments)
    if not seen or not all(_runs(*call) for call in seen):
        return results, None
    recording = _placed(seen, results, given)
    wanted = [tensor.clone() for tensor in (*results, *states)]
    replay = Replay(recording, given)
    if all(_repeats(replay, fill, wanted, states, before) for fill in FILLS):
        return results, recording
    for state, new in zip(states, wanted[len(results) :], strict=True):
        state.copy_(new)
    return results, None


def _repeats(
    replay: Replay,
    fill: int,
    wanted: Sequence[Tensor],
    states: Sequence[Tensor],
    before: Sequence[Tensor],
) -> bool:
    """Whether a replay on the states before, its scratch full of a byte, gives the wanted bits."""
    for state, old in zip(states, before, strict=True):
        state.copy_(old)
    replay.scratch.fill_(fill)
    try:
        replay()
    except RuntimeError:  # what no kernel wrote may be no index
        return False
    return all(map(_same_bits, wanted, [*replay.results, *states]))


def _runs(kernel: Kernel, values: Sequence[Any]) -> bool:
    """Whether a `native.Run` can make this call: inductor's kernels take floats as they are."""
    plain = isinstance(kernel, native.Kernel) or not any(isinstance(v, float) for v in values)
    return plain and len(values) <= native.most_arguments()


class _Span(NamedTuple):
    """The memory of a tensor, and its number."""

    begin: int
    end: int
    number: int


def _spans(tensors: Sequence[Tensor]) -> list[_Span]:
    """Where tensors lie that are not empty, in order."""
    every = ((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    return sorted(_Span(at, at + size, n) for n, (at, size) in enumerate(every) if size)


class _Seen(NamedTuple):
    """Where a tensor was: its address, and its storage's address and bytes."""

    address: int
    begin: int
    nbytes: int


def _see(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    return _Seen(value.data_ptr(), storage.data_ptr(), storage.nbytes())


@contextmanager
def _kernel_calls() -> Iterator[list[tuple[Kernel, list[Any]]]]:
    """The kernel calls that compiled code makes meanwhile in this thread.

    Tensors are not kept, or their memory would not be used again as it is in other runs.
    """
    seen: list[tuple[Kernel, list[Any]]] = []
    here = threading.get_ident()

    def see(kernel: Kernel, arguments: Sequence[Any]) -> None:
        if threading.get_ident() == here:
            seen.append((kernel, list(map(_see, arguments))))

    def recorder(kernel: Kernel) -> Kernel:
        def call(*arguments: Any) -> None:
            see(kernel, arguments)
            kernel(*arguments)

        return call

    places = kernels()
    native.Kernel.watched = see
    try:
        for module, name, kernel in places:
            setattr(module, name, recorder(kernel))
        yield seen
    finally:
        native.Kernel.watched = None
        for module, name, kernel in places:
            setattr(module, name, kernel)


def kernels() -> list[tuple[ModuleType, str, Kernel]]:
    """The C++ kernels in the modules that inductor has written: module, name in it, kernel.

    Nothing public tells of them. Where they are not found, steps are not recorded and run as
    they are (and a test fails).
    """
    from torch._inductor.codecache import PyCodeCache

    return [
        (module, name, kernel)
        for module in PyCodeCache.modules
        for name, kernel in _kernels_in(module)
    ]


@lru_cache(maxsize=1 << 14)
def _kernels_in(module: ModuleType) -> tuple[tuple[str, Kernel], ...]:
    # Modules are looked through once: there are as many as there are compiled steps, and a
    # recording is made of each step.
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel"
    )


def address(kernel: Kernel) -> int:
    """Where a kernel's code is. Inductor's are functions called `kernel` of C++ libraries, which
    Python imports as modules, and take addresses and whole numbers."""
    if isinstance(kernel, native.Kernel):
        return kernel.address
    module = cast(BuiltinFunctionType, kernel).__self__
    return native.address_in(ctypes.CDLL(str(cast(ModuleType, module).__file__)), "kernel")


def _placed(
    seen: Sequence[tuple[Kernel, list[Any]]], results: Sequence[Tensor], given: Sequence[Tensor]
) -> Recording:
    """A recording: addresses as places in what is given and, all others, in scratch.

    Storages that overlap had the memory one after the other; they keep their places in it.
    """
    spans = _spans(given)
    starts = [span.begin for span in spans]

    def span_of(value: _Seen) -> _Span | None:
        at = bisect_right(starts, value.address) - 1
        return spans[at] if at >= 0 and value.address < spans[at].end else None

    returned = [_see(tensor) for tensor in results]
    every = [value for _, values in seen for value in values if isinstance(value, _Seen)]
    made = {
        (value.begin, value.begin + value.nbytes)
        for value in (*every, *returned)
        if span_of(value) is None
    }
    begins: list[int] = []
    ends: list[int] = []
    for begin, end in sorted(made):
        if not begins or begin >= ends[-1]:
            begins.append(begin)
            ends.append(end)
        ends[-1] = max(ends[-1], end)
    offsets, size = [], 0
    for begin, end in zip(begins, ends, strict=True):
        offsets.append(size)
        size += -(-(end - begin) // ALIGNED) * ALIGNED

    def place(value: Any) -> Any:
        if not isinstance(value, _Seen):
            return value
        span = span_of(value)
        if span is not None:
            return Given(span.number, value.address - span.begin)
        block = bisect_right(begins, value.begin) - 1
        return Scratch(offsets[block] + value.address - begins[block])

    calls = [(address(kernel), list(map(place, values))) for kernel, values in seen]
    kept = [
        Result(place(at), tensor.dtype, tensor.shape, tensor.stride())
        for at, tensor in zip(returned, results, strict=True)
    ]
    return Recording(calls, kept, size)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # Compared as whole numbers as wide as the elements: NaN is equal to itself.
    a, b = (tensor.reshape(-1).view(WHOLE[tensor.itemsize]) for tensor in (a, b))
    return torch.equal(a, b)
