"""Replacement of a mixture of experts by one with quantized weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.fx

from ..function import Function, arguments, site_of
from ..weights import Weight

G = torch.ops.graftwork


class Stack(NamedTuple):
    """Quantized weights of one projection of all experts: weight u8[E,R,K*bits/8], scale and offset
    f32|f16[E,R,K/group]."""

    weight: Weight
    scale: Weight
    offset: Weight | None
    group: int


def store_experts(
    fn: Function,
    node: torch.fx.Node,
    gate_up: Stack,
    down: Stack,
    *,
    bits: int,
    how: Mapping[str, bool | int],
) -> None:
    """Replace a call of `graftwork.moe` by `graftwork.quantized_moe`, in place. how: the options of
    it that say how activations are rounded. Errors: `VerifyError` for stacks that do not fit."""
    given = arguments(node)
    named = "gate_up_bias", "down_bias", "activation", "limit", "alpha"
    options = {name: given[name] for name in named} | dict(how)
    options |= {"bits": bits, "group": gate_up.group, "down_group": down.group}
    with fn.graph.inserting_before(node):
        stored = [part and fn.weight(part) for stack in (gate_up, down) for part in stack[:3]]
        new = fn.call(
            G.quantized_moe.default,
            *(given[name] for name in ("x", "experts", "weights")),
            *stored,
            site=site_of(node),
            **options,
        )
    fn.replace(node, new)
