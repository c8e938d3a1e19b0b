"""Tree policies: which predictions become the draft. `base.TREES` finds them."""
