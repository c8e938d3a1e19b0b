"""Faults of a program at a backend, said in one way, and those that are found beforehand."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.fx

from ..ir import InputError, Program, UnsupportedError, Weight, site_of, type_of
from ..ir.execution.analysis import part_of
from ..ir.ops.parallel import join
from .cuda_blocks import runs_on_cuda
from .target import Target

A = torch.ops.aten
OWN = torch.ops.graftwork.linear_attention_step_int8.default
"""What ONNX Runtime runs with graftwork's own kernels alone."""


EXPECTED = (
    "expected indices of rows that there are: token ids below the vocabulary's size, positions "
    "below the context's"
)

_SAID = ("lies outside", "out of range", "out of bounds", "out of data bounds")


def index_fault(error: BaseException, function: str) -> InputError | None:
    """The error about an index that lies outside what it looks up, if that is what happened.

    Compilers may trace on where a step threw, and throw something else.
    """
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, (IndexError, RuntimeError, InputError)) and _is_index_fault(text):
            line = next(line for line in text.splitlines() if _is_index_fault(line))
            line = line.strip().removesuffix(f"; {EXPECTED}")
            return InputError(f"{function}: {line}; {EXPECTED}")
        seen = seen.__cause__ or seen.__context__
    return None


def _is_index_fault(text: str) -> bool:
    return "ind" in text and any(said in text for said in _SAID)


def check_constant_indices(program: Program) -> None:
    """Refuse constants that look up what is not there, before anything runs.

    Errors: `InputError` naming function, value and weight.
    """
    lookups = A.embedding.default, A.gather.default, A.index_select.default, A.index.Tensor
    for name, function in program.functions.items():
        for node in function.calls(*lookups):
            for index, size, counts_back in _lookups(node):
                constant = isinstance(index, torch.fx.Node) and index.op == "get_attr"
                if constant and isinstance(size, int):
                    weight = program.weights[str(index.target)]
                    _check(f"{name}: %{node.name}", weight, size, counts_back)


def _lookups(node: torch.fx.Node) -> list[tuple[Any, Any, bool]]:
    """(index, size of the axis, whether it may count from the end) of each index of a call."""
    given: Any = node.args
    if node.target is A.index.Tensor:
        dims = type_of(given[0]).dims
        return [(index, size, True) for index, size in zip(given[1], dims, strict=False)]
    if node.target is A.embedding.default:
        return [(given[1], type_of(given[0]).dims[0], False)]
    dims = type_of(given[0]).dims
    return [(given[2], dims[given[1]], False)] if dims else []


def _check(where: str, weight: Weight, size: int, counts_back: bool) -> None:
    values = weight.load()
    if values.dtype == torch.bool or not values.numel():
        return
    least, most = int(values.min()), int(values.max())
    if least < (-size if counts_back else 0) or most >= size:
        strange = most if most >= size else least
        raise InputError(
            f"{where} looks up @{weight.name}, which holds the index {strange}; there are {size} "
            f"rows, so expected at most {size - 1}: the program or its weights are damaged"
        )


def check_kernels(program: Program, target: Target) -> None:
    """Whether a target runs a program no slower than what it came from.

    Errors: `UnsupportedError` for weights of few bits on a GPU that no kernel takes there: the op's
    meaning, exact as it is, would take longer than the float weights; and for what ONNX Runtime
    runs with graftwork's own kernels alone, where those are not.
    """
    if target.backend == "onnxruntime" and any(f.calls(OWN) for f in program.functions.values()):
        # By name: the library loads where it is used.
        rows = importlib.import_module(f"{__package__}.onnxruntime.recurrent_states")
        rows.require_kernels(program, target)
    if target.device == "cpu":
        return
    few = (
        torch.ops.graftwork.quantized_linear.default,
        torch.ops.graftwork.quantized_embedding.default,
    )
    for function in program.functions.values():
        for node in function.calls(*few):
            if runs_on_cuda(node, target.backend):
                if target.backend == "torch" and importlib.util.find_spec("triton") is None:
                    raise UnsupportedError(
                        f"target {target}: products with weights of {node.kwargs['bits']} bits "
                        f"need the package triton, which torch's builds for a GPU bring along"
                    )
                continue
            raise UnsupportedError(
                f"target {target}: weights of {node.kwargs['bits']} bits in groups of "
                f"{node.kwargs['group']} ({site_of(node)} of {function.name}) have kernels on the "
                f"CPU alone; take groups of 32 or more, torch:cuda, or {target.backend}:cpu"
            )


def check_columns(program: Program, target: Target) -> None:
    """Whether a step verifies no more than the columns that a target gives it. Errors: `InputError`
    saying how many it takes."""
    needed = program.plan.columns + 1
    if target.columns is not None and needed > target.columns:
        raise InputError(
            f"target {target}: steps of {program.name} have up to {needed} columns (the last token "
            f"and what is drafted): take columns={needed} or more, here and in what it is compared "
            f"with"
        )


def check_processes(program: Program, target: Target) -> None:
    """Join the processes that run a program's parts, if it is one of several.

    Errors: `UnsupportedError` for ONNX Runtime, whose kernels exchange nothing between processes;
    `InputError` if this process is not the one that runs this part.
    """
    part, parts = part_of(program)
    if parts == 1:
        return
    if target.backend == "onnxruntime":
        raise UnsupportedError(
            f"target {target}: the program is part {part} of {parts}, and ONNX Runtime exchanges "
            f"nothing between processes; use torch:{target.device}"
        )
    join(part, parts, target.device)


def check_memory(program: Program, target: Target) -> None:
    """Whether a GPU has room for a program's weights. Errors: `InputError` saying what fits."""
    if target.device == "cpu":
        return
    needed = sum(weight.type.nbytes for weight in program.weights.values())
    free, total = torch.cuda.mem_get_info()
    if needed <= free:
        return
    values = sum(math.prod(weight.type.shape) for weight in program.weights.values())
    fits = 2 * values <= free < needed
    other = f"use {target.backend}:cpu, or a larger one"
    advice = "float16 or bfloat16 would fit" if fits else other
    raise InputError(
        f"target {target}: the weights take {needed / 1e9:.1f} GB, caches come on top, and the GPU "
        f"has {free / 1e9:.1f} GB free of {total / 1e9:.1f}; {advice}"
    )
