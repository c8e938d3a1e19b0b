"""The rows of recurrences and convolutions: graftwork's own kernels, where they can be had."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, UnsupportedError, arguments, site_of
from ...ir import type_of as ir_type
from ...ir.ops.rounded_state import STEPS
from ..target import Target
from .emit import Emitter, row
from .probe import own_attention_available

G = torch.ops.graftwork


OTHERS = (torch.int64, torch.bool, torch.int8)
"""Dtypes of counts, ancestors and codes."""


def _is_own(node: torch.fx.Node) -> bool:
    """Whether the kernel, which comes with attention's, can do a step."""
    dtypes = {ir_type(x).dtype for x in arguments(node).values() if x is not None}
    return dtypes <= {torch.float32, *OTHERS} and not own_attention_available()


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


@row(G.linear_attention_step.default, when=_is_own, native=True)
def linear_attention_step(e: Emitter, *operands: Any) -> Any:
    state_and_counts, ancestors, sequence = operands[:7], operands[7], operands[8:12]
    given = (*state_and_counts, *sequence, ancestors, operands[12])
    return e.own("LinearAttentionStep", *given, threads=e.threads, outputs=5)


@row(G.linear_attention_step_int8.default, when=_is_own, native=True)
def linear_attention_step_int8(e: Emitter, *operands: Any) -> Any:
    state_and_counts, ancestors, sequence = operands[:8], operands[8], operands[9:13]
    given = (*state_and_counts, *sequence, ancestors, operands[13])
    return e.own("LinearAttentionStepInt8", *given, threads=e.threads, outputs=6)


@row(G.causal_conv_step.default, when=_is_own, native=True)
def causal_conv_step(e: Emitter, *operands: Any) -> Any:
    states_and_counts, ancestors, sequence = operands[:5], operands[5], operands[6:8]
    given = (*states_and_counts, *sequence, ancestors, operands[8])
    return e.own("CausalConvStep", *given, threads=e.threads, outputs=3)
