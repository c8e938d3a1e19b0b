"""Depth policies: how many layers a token runs through. One file each."""

from .base import DEPTHS, DepthPolicy

__all__ = ["DEPTHS", "DepthPolicy"]
