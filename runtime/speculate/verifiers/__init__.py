"""Verifiers: how much of a draft the target keeps. One file each; `base.VERIFIERS` finds them."""
