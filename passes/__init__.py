"""Passes: one file each, Program in, Program out."""

from .engine.base import Contract, Effect, Outcome, Pass, all_passes, register

__all__ = ["Contract", "Effect", "Outcome", "Pass", "all_passes", "register"]
