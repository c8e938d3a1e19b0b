"""Which ATen composites stay whole in programs: a table for frontends and rewrite patterns.

A frontend decomposes what `torch.export` gives with it, and a pattern written as plain torch code
is traced with it, so the same Python code ends up as the same nodes in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

# Composites that backends and passes want to see as one node.
KEPT = frozenset(
    {
        "aten.conv1d",
        "aten.embedding",
        "aten.gelu",
        "aten.group_norm",
        "aten.layer_norm",
        "aten.linear",
        "aten.matmul",
        "aten.rms_norm",
        "aten.scaled_dot_product_attention",
        "aten.silu",
        "aten.softmax",
    }
)


def is_kept(target: Any) -> bool:
    """Whether a call of this overload stays one node (graftwork ops always do)."""
    return str(target).rpartition(".")[0] in KEPT or target.namespace == "graftwork"


@lru_cache(maxsize=1)
def _table() -> dict[Any, Callable[..., Any]]:
    table = torch.export.default_decompositions()
    return {op: table[op] for op in table if not is_kept(op)}


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions`` (a fresh dict)."""
    return dict(_table())
