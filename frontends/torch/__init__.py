"""The frontend for plain `nn.Module`s that map token ids to logits."""

from .module import import_module

__all__ = ["import_module"]
