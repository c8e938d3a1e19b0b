"""Checks of whole programs: the verifier, and whether the parts of a plan fit each other."""
