"""Tree policies: which predictions become the draft. `base.TREES` finds them."""

from .base import TREES, TreePolicy

__all__ = ["TREES", "TreePolicy"]
