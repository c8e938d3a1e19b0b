"""Proposers: predictions of the next tokens, level by level. `base.PROPOSERS` finds them."""

from .base import PROPOSERS, Level, Proposer

__all__ = ["PROPOSERS", "Level", "Proposer"]
