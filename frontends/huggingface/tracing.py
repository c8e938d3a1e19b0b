"""From a part of a model of transformers to its function, traced or read where traces are kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from ...ir import UnsupportedError, Weight
from ..importer import LOGITS, Imported, import_exported
from ..kept_traces import kept_trace
from ..layers import Kinds, NotAlike
from ..trace import export
from ..trace_key import trace_key
from .recurrences import as_ops
from .registry import one_sequence_a_row, reading_sources

WHOLE = "GRAFTWORK_TRACE_ALL_LAYERS"
"""The environment variable that has every layer traced, also one like others; set to 1."""


def import_traced(
    wrapper: Any,
    mode: FakeTensorMode,
    context: int,
    weight_of: Callable[[str], Weight],
    *,
    outputs: Sequence[str] = LOGITS,
    name: str = "step",
    reads_source: bool = False,
) -> Imported:
    """The function, called `name`, of a module that maps tensors to `outputs`.

    wrapper: its attribute ``model`` is the model, without data, and ``inputs`` says what it takes.
    context: the largest number of tokens. weight_of: the weight for a parameter or buffer, by its
    path in the model. reads_source: whether attention may be to a source. Errors:
    `UnsupportedError` for what cannot be traced.
    """
    kind, inputs = wrapper.model.config.model_type, wrapper.inputs
    types = {taken: str(type) for taken, type in inputs.items()}
    key = trace_key(wrapper, kind, context, types, tuple(outputs), name, reads_source)

    def make(kinds: Kinds | None) -> Imported:
        with contextlib.ExitStack() as inside:
            inside.enter_context(one_sequence_a_row())
            inside.enter_context(as_ops(wrapper.model))
            if reads_source:
                inside.enter_context(reading_sources())
            if kinds is not None:
                inside.enter_context(kinds.watched())
            exported = export(wrapper, mode, context, kind, list(inputs.values()))
        if kinds is not None and kinds.number_used:
            raise NotAlike("a layer's number is used")
        return import_exported(exported, "model", weight_of, inputs, outputs, name)

    def by_kinds() -> Imported:
        if os.environ.get(WHOLE, "") in ("", "0"):
            with contextlib.suppress(NotAlike, UnsupportedError):
                return make(Kinds(wrapper.model))
        return make(None)

    return kept_trace(key, weight_of, by_kinds)
