"""A model as its frontend gives it, and where it came from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .frontends.generation import Known, nobody
from .ir import InputError, Program

Source = str | Path | torch.nn.Module
"""A local checkpoint folder, .gguf or .onnx file, or a model in memory."""


@dataclass(frozen=True)
class Traced:
    """A model as its frontend gives it. source: what the report calls it. seconds: tracing took.
    model: what was traced."""

    program: Program
    source: str
    seconds: float
    model: Source

    @classmethod
    def of(cls, model: Source, dtype: torch.dtype, known: Known = nobody) -> Traced:
        """Trace a model with weights in `dtype`. known, errors: as `optimize`."""
        from .artifact import is_saved
        from .frontends import import_model

        if isinstance(model, (str, Path)) and is_saved(Path(model)):
            raise InputError(
                f"{model} is a saved artifact, optimized already: load it, or give the checkpoint "
                f"that it was made from"
            )

        start = time.perf_counter()
        program = import_model(model, dtype=dtype, known=known)
        name = str(model) if isinstance(model, (str, Path)) else type(model).__name__
        return cls(program, name, time.perf_counter() - start, model)
