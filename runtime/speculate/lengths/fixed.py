"""Drafts as they come."""

from __future__ import annotations

from ....ir.plan import FixedLength
from .base import LENGTHS, LengthPolicy


@LENGTHS.register(FixedLength)
class FixedLengthPolicy(LengthPolicy):
    """Always the whole draft: the plan's most wherever anything fits."""
