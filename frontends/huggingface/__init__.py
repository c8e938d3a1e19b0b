"""The frontend for causal language models of Hugging Face transformers."""

from .model import import_folder, import_object, without_data

__all__ = ["import_folder", "import_object", "without_data"]
