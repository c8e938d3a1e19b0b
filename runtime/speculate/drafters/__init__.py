"""Drafters: what may come next, guessed cheaply. One file each; `base.DRAFTERS` finds them."""
