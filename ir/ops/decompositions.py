"""ATen composites that are not decomposed when rewrite patterns are traced."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

# Kept by frontends, matched by passes, and run by kernels of backends.
KEPT = frozenset(
    {
        "aten.conv1d",
        "aten.embedding",
        "aten.gelu",
        "aten.group_norm",
        "aten.layer_norm",
        "aten.linear",
        "aten.masked_fill",
        "aten.matmul",
        "aten.rms_norm",
        "aten.scaled_dot_product_attention",
        "aten.silu",
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
