"""Reading calls: arguments by the names of the op's schema, and the value that comes first."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch.fx


@lru_cache(maxsize=4096)
def _defaults(target: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in target._schema.arguments)


def arguments(node: torch.fx.Node) -> dict[str, Any]:
    """A call's arguments by name, in the schema's order, defaults filled in."""
    defaults = _defaults(node.target)
    bound = dict(defaults)
    bound.update(zip((name for name, _ in defaults), node.args, strict=False))
    bound.update(node.kwargs)
    return bound


def source_of(node: torch.fx.Node) -> torch.fx.Node:
    """The value that is a call's first argument."""
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    return source
