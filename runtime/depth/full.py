"""Every layer for every token."""

from __future__ import annotations

from ...ir.plan import FullDepth
from .base import DEPTHS, DepthPolicy


@DEPTHS.register(FullDepth)
class FullDepthPolicy(DepthPolicy):
    """The step as it is."""
