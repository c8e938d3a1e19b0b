"""The torch backend: one `fx.GraphModule` a function and width, run eagerly or through inductor."""

from __future__ import annotations

from ...ir import Program
from ..target import Target
from .executable import TorchExecutable


def compile(program: Program, target: Target) -> TorchExecutable:
    """An executable for target ``eager`` (uncompiled) or ``torch`` (inductor), on CPU or CUDA."""
    return TorchExecutable(program, target)
