"""Verifiers: how much of a draft the target keeps. One file each; `base.VERIFIERS` finds them."""

from .base import GREEDY, NOTHING_GAINED, SAMPLING, VERIFIERS, Verdict, Verifier

__all__ = ["GREEDY", "NOTHING_GAINED", "SAMPLING", "VERIFIERS", "Verdict", "Verifier"]
