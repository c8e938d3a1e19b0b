"""The frontend for GGUF files, llama.cpp's format: a model, weights and tokenizer in one."""

from .model import import_gguf

__all__ = ["import_gguf"]
