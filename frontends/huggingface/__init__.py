"""The frontend for causal language models of Hugging Face transformers."""

from .model import import_folder, import_object, without_data
from .names import CheckpointNames

__all__ = ["CheckpointNames", "import_folder", "import_object", "without_data"]
