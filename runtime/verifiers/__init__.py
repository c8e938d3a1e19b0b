"""Verifiers: how much of a draft the target keeps. One file each; `base.VERIFIERS` finds them."""

from .base import GREEDY, SAMPLING, VERIFIERS, Verifier

__all__ = ["GREEDY", "SAMPLING", "VERIFIERS", "Verifier"]
