"""Rows of ops that graftwork's own kernels run, as the ops declare it (`ir.ops.Native`)."""

from __future__ import annotations

from typing import Any

import torch.fx

from ...ir import arguments
from ...ir import type_of as ir_type
from ...ir.ops import OpDef, op_of
from ..own_kernels import absent_is_zero, floats, own_ops, zero_of
from .emit import Emitter, row
from .own_ops import node_name
from .probe import own_attention_available


def runs_own(node: torch.fx.Node) -> bool:
    """Whether graftwork's own kernel runs a call on a CPU. Each gives a token the same bits
    whatever shares its step."""
    op = op_of(node.target)
    if op is None or op.native is None:
        return False
    given = arguments(node)
    plain = all(given[x] is None or ir_type(given[x]).dtype == torch.float32 for x in floats(op))
    zeroed = all(given[x] != 0 for x in absent_is_zero(op))
    return plain and zeroed and not own_attention_available()


def _enter(op: OpDef) -> None:
    """The row of an op that has a kernel."""
    name, zeros = node_name(op), zero_of(op)
    results = len(op.declared.results)

    def emit(e: Emitter, *operands: Any) -> Any:
        count = len(operands) - len(zeros)
        given = zip(zeros.items(), operands[count:], strict=True)
        how = {option: value or zero for (option, zero), value in given}
        many = results if results > 1 else None
        return e.own(name, *operands[:count], **how, threads=e.threads, outputs=many)

    row(op.overload, when=runs_own, native=True)(emit)


for _op in own_ops():
    if _op.native is not None:
        _enter(_op)
