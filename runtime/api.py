"""The names of `graftwork.runtime`."""

from .asking.options import GenerationOptions
from .generation import Generated, forget, generate
from .stats import Stats

__all__ = ["Generated", "GenerationOptions", "Stats", "forget", "generate"]
