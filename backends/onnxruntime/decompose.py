"""Replaces calls that have no row by what they mean, in ops that have one.

See `ir.expand`.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any

from torch._decomp import decomposition_table

from ...ir import Function, UnsupportedError
from ...ir.rewrite.expand import expand
from .emit import Guard, row_of, targets_with_rows

_DEPTH = 8  # meanings within meanings; a loop would never end otherwise


def decompose(function: Function, native: bool = False, refused: Guard | None = None) -> int:
    """Replace calls without a row, in place. Returns how many were replaced.

    native: graftwork's own ops may be among the rows, see `emit`. refused: calls whose row is not
    for this target.
    Errors: `UnsupportedError` naming an op that has neither a row nor a decomposition.
    """
    count = 0
    for _ in range(_DEPTH):
        calls = (n for n in function.calls() if n.target is not operator.getitem)
        todo = [n for n in calls if not row_of(n, native) or (refused and refused(n))]
        if not todo:
            return count
        for node in todo:
            try:
                expand(function, node, _table)
            except UnsupportedError as error:
                raise UnsupportedError(f"onnxruntime: {error}") from error
        count += len(todo)
    raise UnsupportedError(f"onnxruntime: {todo[0].target} decomposes into itself")


@lru_cache(maxsize=1)
def _table() -> dict[Any, Any]:
    """torch's decompositions of what has no row; those into prims, which are no ATen, left out."""
    kept = targets_with_rows()
    found = {op: how for op, how in decomposition_table.items() if op not in kept}
    return {op: how for op, how in found.items() if not how.__module__.startswith("torch._refs")}
