"""Models in ONNX, whoever exported them, as programs."""

from .model import import_onnx

__all__ = ["import_onnx"]
