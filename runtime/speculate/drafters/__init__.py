"""Drafters: what may come next, guessed cheaply. One file each; `base.DRAFTERS` finds them."""

from .base import DRAFTERS, NO_DRAFT, Draft, Drafter

__all__ = ["DRAFTERS", "NO_DRAFT", "Draft", "Drafter"]
