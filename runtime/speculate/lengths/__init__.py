"""Length policies: how much of a draft is worth verifying. One file each."""

from .base import LENGTHS, LengthPolicy

__all__ = ["LENGTHS", "LengthPolicy"]
