"""Reading calls."""

from __future__ import annotations

import torch.fx


def source_of(node: torch.fx.Node) -> torch.fx.Node:
    """The value that is a call's first argument."""
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    return source
