"""A traced model and its source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ..artifact.saved import is_saved
from ..frontends import import_model
from ..frontends.generation import Known, nobody
from ..ir import InputError, Program

Source = str | Path | torch.nn.Module
"""A local checkpoint folder, .gguf or .onnx file, or a model in memory."""


@dataclass(frozen=True)
class Traced:
    """A traced model. source: name in reports. seconds: of tracing. model: the source."""

    program: Program
    source: str
    seconds: float
    model: Source

    @classmethod
    def of(cls, model: Source, dtype: torch.dtype, known: Known = nobody) -> Traced:
        """Trace a model with weights in `dtype`. known, errors: as `optimize`."""
        if isinstance(model, (str, Path)) and is_saved(Path(model)):
            raise InputError(
                f"{model} is a saved artifact, optimized already: load it, or give the checkpoint "
                f"that it was made from"
            )

        start = time.perf_counter()
        program = import_model(model, dtype=dtype, known=known)
        name = str(model) if isinstance(model, (str, Path)) else type(model).__name__
        return cls(program, name, time.perf_counter() - start, model)
