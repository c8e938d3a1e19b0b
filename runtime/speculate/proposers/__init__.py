"""Proposers: predictions of the next tokens, level by level. `base.PROPOSERS` finds them."""

from .base import PROPOSERS, Proposer

__all__ = ["PROPOSERS", "Proposer"]
