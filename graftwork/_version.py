"""The version of graftwork."""

__version__ = "0.1.0"
