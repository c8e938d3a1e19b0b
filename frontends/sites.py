"""Where a traced node comes from: module path, layer index and source line."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import PurePath

import torch.fx

from ..ir import NOWHERE, Site, site_of

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def site_of_trace(node: torch.fx.Node, root: str) -> Site:
    """The site of a node that `torch.export` made. root: path of the model inside the wrapper."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [strip_root(str(path), root) for path, _ in stack.values()]
    module = paths[-1] if paths else ""
    site = Site(module, layer_of(module), _line(node.meta.get("stack_trace") or ""))
    return site or NOWHERE


def where(node: torch.fx.Node) -> str:
    """Where a node comes from, for messages: its module and line, or its name."""
    site = site_of(node)
    return f"module {site.module} ({site.line})" if site else f"%{node.name}"


def strip_root(path: str, root: str) -> str:
    """A path inside the wrapper as a path inside the model."""
    return path.removeprefix(root).removeprefix(".")


@lru_cache(maxsize=4096)
def layer_of(module: str) -> int | None:
    """The first index in a module path: ``model.layers.3.mlp`` is in layer 3."""
    indices = [int(part) for part in module.split(".") if part.isdecimal()]
    return indices[0] if indices else None


@lru_cache(maxsize=4096)
def _line(trace: str) -> str:
    frames = _FRAME.findall(trace)
    # The model's own line says more than the line of torch.nn.Linear that it calls.
    own = [frame for frame in frames if "torch" not in PurePath(frame[0]).parts] or frames
    return f"{PurePath(own[-1][0]).name}:{own[-1][1]}" if own else ""
