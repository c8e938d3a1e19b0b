"""What states of recurrences and convolutions need of graftwork's own kernels."""

from __future__ import annotations

import operator

import torch

from ...ir import Function, Program, UnsupportedError, site_of
from ...ir.ops.rounded_state import STEPS
from ..target import Target
from .probe import own_attention_available

G = torch.ops.graftwork


def require_kernels(program: Program, target: Target) -> None:
    """Errors: `UnsupportedError` for recurrences over states in 8 bits where the kernels are not
    that alone run them: each token rounds what the next one reads, and no graph says that."""
    why = "they run on the CPU" if target.device != "cpu" else own_attention_available()
    for function in program.functions.values() if why else ():
        for node in function.calls(G.linear_attention_step_int8.default):
            raise UnsupportedError(
                f"target {target}: recurrent states in 8 bits ({site_of(node)} of {function.name}) "
                f"need graftwork's own kernels, which are not here: {why}; take another target, "
                f"such as torch, or a recipe without quantize_state"
            )


def is_written_in_place(function: Function, state: str) -> bool:
    """Whether what a lowered function makes of a state may lie where the state is: a kernel of ours
    writes it, which has read all of the old one by then, and nothing else reads that."""
    made, old = function.outputs[state], function.input(state)
    if made.target is not operator.getitem:
        return False
    step = made.all_input_nodes[0]
    return step.target in STEPS and list(old.users) == [step]
