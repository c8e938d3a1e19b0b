"""What functions are fed where a pass runs them on text."""

from __future__ import annotations

import torch

from ...ir import Program, type_of
from ...ir.protocol import chain_inputs


def empty_inputs(program: Program, function: str, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a function is fed with a text i64[1,T] and empty states."""
    sizes, given = {"B": 1, "C": tokens.shape[1]}, chain_inputs(tokens)
    inputs = {}
    for node in program.function(function).inputs:
        name = str(node.target)
        if name in program.states:
            bound = type_of(node).bind(sizes)
            inputs[name] = torch.zeros(bound.shape, dtype=bound.dtype)
        elif name in given:
            inputs[name] = given[name]
    return inputs
