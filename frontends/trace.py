"""Tracing models whose weights are never read: parameters are fake, so a trace costs no memory."""

from __future__ import annotations

import contextlib
import copy
import io
import linecache
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import PurePath
from types import FrameType
from typing import Any, TextIO

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..ir import GraftworkError, Sym, TensorType, UnsupportedError, Weight
from .importer import INPUTS

_SIZES = {"B": 2, "T": 11, "N": 13}
"""Sizes that a trace is made with; any would do, but 0 and 1, which torch treats specially."""


def fake_mode() -> FakeTensorMode:
    """A mode for the parameters and inputs of one trace; buffers may stay real."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    # With symbolic sizes, keeping results for calls that seldom come again takes longer than them.
    mode.cache_enabled = False
    return mode


def fake_parameter(like: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without data, on the CPU."""
    with mode:
        return nn.Parameter(torch.empty(like.shape, dtype=dtype), requires_grad=False)


@contextlib.contextmanager
def parameters_without_data(mode: FakeTensorMode) -> Iterator[None]:
    """Modules created inside, by this thread, get fake parameters; their buffers are real."""
    register, here = nn.Module.register_parameter, threading.get_ident()

    def register_fake(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        ours = threading.get_ident() == here
        if ours and parameter is not None and not isinstance(parameter.data, FakeTensor):
            parameter = fake_parameter(parameter, mode, parameter.dtype)
        register(self, name, parameter)

    owner: Any = nn.Module
    owner.register_parameter = register_fake
    try:
        yield
    finally:
        owner.register_parameter = register


def twin_of(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model with fake parameters (floating ones in `dtype`), in inference mode.

    Buffers are shared with the model. Hooks, patched methods and configuration are copied, so the
    twin computes what the model computes and may be changed freely.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        memo[id(parameter)] = fake_parameter(parameter, mode, wanted)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().cpu()
    return copy.deepcopy(model, memo).eval()


def export(
    wrapper: nn.Module,
    mode: FakeTensorMode,
    context: int | None,
    name: str,
    inputs: Sequence[TensorType] = tuple(INPUTS.values()),
) -> ExportedProgram:
    """The trace of a module that maps tensors of these types to logits, or to what a part gives.

    wrapper: its attribute ``model`` is the model. inputs: with the symbols B, T, the tokens of a
    step, and N, the rows of a source. context: the largest T, None to find it out from
    what the model does. name: the model, for errors. Errors: `UnsupportedError` saying in which
    module and line tracing stopped.
    """
    bound = [type.bind(_SIZES) for type in inputs]
    with mode:
        arguments = tuple(torch.zeros(type.shape, dtype=type.dtype) for type in bound)
    sizes = dict.fromkeys(_SIZES, Dim.AUTO)
    # One below the context: models compare T with the length of their tables, to skip a slice.
    longest = {"B": 2**16, "T": (context or 2**20) - 1, "N": 2**20}
    longest = {name: max(most, _SIZES[name]) for name, most in longest.items()}
    if context is not None:
        sizes = {name: Dim(name, min=1, max=most) for name, most in longest.items()}
    shapes = tuple(
        {axis: sizes[dim.text] for axis, dim in enumerate(type.dims) if isinstance(dim, Sym)}
        for type in inputs
    )
    try:
        with _quiet(), torch.no_grad():
            return _exported(wrapper, arguments, shapes, inputs, longest)
    except Exception as error:  # tracing runs the model's code, which raises whatever it likes
        raise UnsupportedError(_explain(name, wrapper, error)) from error


def _exported(
    wrapper: nn.Module,
    arguments: tuple[torch.Tensor, ...],
    shapes: tuple[dict[int, Any], ...],
    inputs: Sequence[TensorType],
    longest: dict[str, int],
) -> ExportedProgram:
    """The trace, comparisons of sizes proved or, where torch cannot, tried with sizes up to the
    longest. (Before 2.13 it does not know that min(T, 4 * T) is T.)"""
    trace = partial(torch.export.export, wrapper, arguments, dynamic_shapes=shapes, strict=False)
    try:
        return trace()
    except Exception as error:
        if "satisfy the generated guard" not in str(error):
            raise
        program = trace(prefer_deferred_runtime_asserts_over_guards=True)
        values = [(1, 2, 3, _SIZES[name], most) for name, most in longest.items()]
        tried = [dict(zip(longest, chosen, strict=True)) for chosen in product(*values)]
        if all(_holds(program, inputs, sizes) for sizes in tried):
            return program
        raise


def _holds(program: ExportedProgram, inputs: Sequence[TensorType], sizes: dict[str, int]) -> bool:
    """Whether all comparisons that a trace asserts are true of some sizes."""
    names = program.graph_signature.user_inputs
    types = dict(zip(names, inputs, strict=True))

    def value(arg: Any) -> Any:
        if not isinstance(arg, torch.fx.Node):
            return arg
        if arg.target is torch.ops.aten.sym_size.int:
            source, axis = arg.args
            dim = types[source.name].dims[axis]  # type: ignore[union-attr]
            return dim.evaluate(sizes.__getitem__) if isinstance(dim, Sym) else dim
        return arg.target(*map(value, arg.args), **arg.kwargs)  # type: ignore[operator]

    asserted = [node for node in program.graph.nodes if node.target is _ASSERT]
    try:
        return all(value(node.args[0]) for node in asserted)
    except KeyError:  # the size of something that is no input
        return False


_ASSERT = torch.ops.aten._assert_scalar.default


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch logs about how models are written, and about errors that we explain."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(_WithoutGraphs(sys.stderr)):
                yield
    finally:
        logging.disable(before)


class _WithoutGraphs(io.TextIOBase):
    """Standard error, less the half-traced graphs that torch prints there when a trace fails."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._in_graph = stream, False

    def write(self, text: str) -> int:
        was, self._in_graph = self._in_graph, "def forward(" in text
        if self._in_graph or (was and text == "\n"):
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def first_names(model: nn.Module) -> dict[str, str]:
    """For every parameter and buffer the first of its names; tied ones have several."""
    first: dict[int, str] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def weights_of(model: nn.Module, twin: nn.Module) -> Callable[[str], Weight]:
    """What gives the weight for each parameter or buffer of a twin, by its path: the model's own
    tensor, parameters in the twin's dtypes."""
    held: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held.update(model.named_buffers(remove_duplicate=False))
    wanted = {name: p.dtype for name, p in twin.named_parameters(remove_duplicate=False)}
    first = first_names(twin)

    def weight_of(name: str) -> Weight:
        name = first[name]
        tensor = held[name].detach()
        return Weight.of(name, tensor).cast(wanted.get(name, tensor.dtype))

    return weight_of


def _explain(name: str, wrapper: nn.Module, error: BaseException) -> str:
    """Which module and line of the model a failed trace stopped at, and why."""
    frames = [(f, n, f.f_locals.get("self")) for f, n in _frames(error)]
    # Torch may have traced a copy of the wrapper.
    root = next((owner for _, _, owner in frames if type(owner) is type(wrapper)), wrapper)
    paths = {id(module): path for path, module in root.named_modules()}
    where = ""
    for frame, number, owner in frames:
        if paths.get(id(owner), "") in ("", "model"):
            continue
        code = linecache.getline(frame.f_code.co_filename, number).strip()
        line = f"{PurePath(frame.f_code.co_filename).name}:{number}: {code}"
        where = f" in module {paths[id(owner)].removeprefix('model.')} at {line}"
    if isinstance(error, GraftworkError):
        return f"cannot import {name}{where}: {error}"
    lines = [text.strip(" -.") for text in str(error).splitlines() if text.strip()]
    reason = f"{type(error).__name__}: {' '.join(lines[:2])}"
    # Torch says one or the other of the same model, from run to run.
    if "specialized" in reason or "Constraints violated" in reason:
        reason = f"it runs Python code for each token (a loop over the sequence); {reason}"
    return (
        f"cannot trace {name}{where}: {reason}. Expected a language model whose graph does "
        "not depend on the data; such models are not supported yet"
    )


def _frames(error: BaseException | None) -> Iterator[tuple[FrameType, int]]:
    """Frames and line numbers of an error and of those that it replaced, innermost last."""
    if error is None:
        return
    yield from traceback.walk_tb(error.__traceback__)
    yield from _frames(error.__cause__ or error.__context__)
