"""Training objectives, one file for each kind of record; `base.OBJECTIVES` registers them."""

from .base import OBJECTIVES, Batch, Loss

__all__ = ["OBJECTIVES", "Batch", "Loss"]
