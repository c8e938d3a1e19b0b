"""Drafters: what may come next, guessed cheaply. One file each; `base.DRAFTERS` finds them."""

from .base import DRAFTERS, Drafter

__all__ = ["DRAFTERS", "Drafter"]
