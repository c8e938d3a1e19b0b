"""Cache policies: which rows of the committed text the states keep. One file each."""

from .base import CACHES, CachePolicy

__all__ = ["CACHES", "CachePolicy"]
