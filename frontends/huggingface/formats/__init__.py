"""Formats of quantized checkpoints: one file a format, found by the method in config.json."""

from .base import Format, format_of, read

__all__ = ["Format", "format_of", "read"]
