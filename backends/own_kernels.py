"""Ops that a kernel of `kernels/` runs on both backends, as their declarations say (`Native`)."""

from __future__ import annotations

import ctypes
import functools

from ..ir.ops import OpDef, all_ops
from ..ir.support.errors import InputError
from .cached_library import SHARED, library


@functools.cache
def own_ops() -> tuple[OpDef, ...]:
    """The ops that have a kernel."""
    return tuple(op for op in all_ops().values() if op.native is not None)


class Entries(ctypes.Structure):
    """See `Kernel` in `kernels/door.h`."""

    with_threads: int
    members: int
    _fields_ = (
        ("with_threads", ctypes.c_void_p),
        ("with_team", ctypes.c_void_p),
        ("members", ctypes.c_int64),
    )


@functools.cache
def entries(name: str) -> Entries:
    """The entries of the kernel of an op of this name. Errors: as `library`, and `InputError` for a
    kernel of another number of members than the op declares."""
    op, found = all_ops()[name], Entries.in_dll(library(SHARED), f"{name}_kernel")
    assert op.native is not None
    told = len(op.declared.names) + len(op.declared.results) + len(op.native.sizes)
    if found.members != told:
        raise InputError(
            f"{name}: its kernel has {found.members} members, and the declaration says {told}: "
            f"{len(op.declared.names)} operands and options, {len(op.declared.results)} results "
            f"and the sizes {op.native.sizes!r}"
        )
    return found


def floats(op: OpDef) -> tuple[str, ...]:
    """The operands of any floating dtype, which kernels take in float32."""
    return tuple(name for name, kind, _ in op.declared.operands if kind in ("", "float"))


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
