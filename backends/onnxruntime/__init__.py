"""The ONNX Runtime backend: fused graphs, shared cache buffers, one session a kind of step."""

from __future__ import annotations

from ...ir import Program
from ..target import Target
from .executable import OnnxExecutable


def compile(program: Program, target: Target) -> OnnxExecutable:
    """An executable for target ``onnxruntime``, on CPU or CUDA.

    Errors: `InputError` if the CUDA provider is missing, `UnsupportedError` for bfloat16 on
    the CPU. An op that cannot be lowered raises `UnsupportedError` when its function first runs.
    """
    return OnnxExecutable(program, target)
