"""What a drafter is trained for: one file a kind of draft record; `base.OBJECTIVES` finds them."""

from .base import OBJECTIVES, Batch, Loss

__all__ = ["OBJECTIVES", "Batch", "Loss"]
