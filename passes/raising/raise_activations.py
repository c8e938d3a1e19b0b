"""Recognise activations that are spelled as formulas.

Before::

    %s: f32[B,T,8] = aten.sigmoid(%x)
    %y: f32[B,T,8] = aten.mul.Tensor(%x, %s)

After::

    %y: f32[B,T,8] = aten.silu(%x)

Also the error-function and the tanh formula of gelu, in the spellings that models use. Formulas
with other constants (quick gelu) stay as they are.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.fx
from torch import Tensor

from ...ir import Function, Program
from ...ir.rewrite.match import Match
from ...ir.rewrite.rules import Builder, Rule, apply_rules
from ..engine.base import Outcome, Pass, register
from ..engine.functions import edit_each

A = torch.ops.aten


@register
class RaiseActivations(Pass):
    """No options."""

    provides: ClassVar[frozenset[str]] = frozenset({"activations"})

    def run(self, program: Program) -> Outcome:

        def edit(fn: Function) -> int | str:
            result = apply_rules(fn, RULES, program.weights)
            return result.count or result.near_miss

        return edit_each(program, edit)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _gelu_tanh_factored(x: Tensor) -> Tensor:
    inner = x * math.sqrt(2 / math.pi) * (1 + 0.044715 * x * x)
    return x * 0.5 * (1.0 + torch.tanh(inner))


def _gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_erf_scaled(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def _rule(pattern: Any, needs: Any, target: Any, **options: Any) -> Rule:
    def replace(b: Builder, m: Match) -> torch.fx.Node:
        return b.call(target, m["x"], **options)

    return Rule(pattern.__name__.strip("_"), {"x": "F[...]"}, pattern, replace, needs=needs)


RULES = [
    _rule(_silu, A.sigmoid.default, A.silu.default),
    _rule(_gelu_tanh, A.tanh.default, A.gelu.default, approximate="tanh"),
    _rule(_gelu_tanh_factored, A.tanh.default, A.gelu.default, approximate="tanh"),
    _rule(_gelu_erf, A.erf.default, A.gelu.default),
    _rule(_gelu_erf_scaled, A.erf.default, A.gelu.default),
]
