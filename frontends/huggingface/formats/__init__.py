"""Formats of quantized checkpoints: one file a format, found by the method in config.json."""

from . import awq, bitsandbytes, compressed_tensors, gptq  # noqa: F401  (they register themselves)
from .base import Format, format_of, read

__all__ = ["Format", "format_of", "read"]
