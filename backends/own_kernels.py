"""Ops that a kernel of `kernels/` runs on both backends, as their declarations say (`Native`)."""

from __future__ import annotations

import functools

from ..ir.ops import OpDef, all_ops
from ..ir.ops.declared import parts


@functools.cache
def own_ops() -> tuple[OpDef, ...]:
    """The ops that have a kernel."""
    return tuple(op for op in all_ops().values() if op.native is not None)


def floats(op: OpDef) -> tuple[str, ...]:
    """The operands of any floating dtype, which kernels take in float32."""
    found = (parts(item) for item in op.declared.items if ": " in item)
    return tuple(name for name, kind, _ in found if kind in ("", "float"))


def options(op: OpDef) -> dict[str, str]:
    """What an op takes besides tensors, and of which type, in order."""
    given = {a.name: str(a.type) for a in op.overload._schema.arguments}
    return {name: kind for name, kind in given.items() if "Tensor" not in kind}


def absent_is_zero(op: OpDef) -> tuple[str, ...]:
    """Options that may be None, and then are 0 to a kernel."""
    return tuple(name for name, kind in options(op).items() if kind == "Optional[float]")


def zero_of(op: OpDef) -> dict[str, float]:
    """The options of an op, and what is 0 in their types: kernels take it for None."""
    return {name: 0.0 if "float" in kind else 0 for name, kind in options(op).items()}
