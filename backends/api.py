"""Backends: Program -> Executable."""

from __future__ import annotations

import importlib

from ..ir import Program
from ..ir.execution.executable import Executable
from .embeds_step import with_embeds
from .faults import (
    check_columns,
    check_constant_indices,
    check_kernels,
    check_memory,
    check_processes,
)
from .picture_step import with_pictures
from .states_step import with_states
from .target import BACKENDS, Target

__all__ = ["BACKENDS", "Target", "check_columns", "check_kernels", "compile"]


def compile(program: Program, target: Target) -> Executable:
    """Lower a cached-stage program for a target and make it runnable.

    Errors: `InputError` if the device is missing or its memory too small for the weights, a
    constant index lies outside what it looks up, or the program is a part of one and this process
    not the one that runs it; `UnsupportedError` naming an op that the backend
    cannot lower, see `check_kernels` and `check_columns`, too.
    """
    target.require_device()
    check_processes(program, target)
    check_kernels(program, target)
    check_columns(program, target)
    check_memory(program, target)
    check_constant_indices(program)
    module = importlib.import_module(f"{__package__}.{BACKENDS[target.backend]}")
    for more in (with_pictures, with_embeds, with_states):
        program = more(program)
    executable: Executable = module.compile(program, target)
    return executable
