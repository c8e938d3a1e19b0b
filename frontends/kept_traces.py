"""Traces that are kept on disk: a model that was traced before is read in a fraction of the time.

What is kept is what `import_exported` gives, as text: the function, and what its weights are made
of, down to those that are the model's own, of which there are only the names. A file that does not
fit the weights at hand counts as none.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from ..ir import GraftworkError, Weight, WeightStore, function_text, parse_function
from ..ir.text.kept_files import Kept, kept_file, read_kept, write_kept
from ..ir.text.weights_text import parse_weights, weights_text
from .importer import Imported

ALSO = (torch.ops.aten.scaled_dot_product_attention.default,)
"""Ops of traces that programs do not have, see `raise_attention`."""


def kept_trace(
    key: str | None, weight_of: Callable[[str], Weight], make: Callable[[], Imported]
) -> Imported:
    """The trace that `make` would make, from its file where one is kept, else made and kept.

    key: of the trace, see `trace_key`; None: nothing is kept. weight_of: the weight for a parameter
    or buffer, by its path in the model.
    """
    if key is None:
        return make()
    with kept_file("traces", key) as path:
        found = _read(path, weight_of)
        if found is not None:
            return found
        made = make()
        with contextlib.suppress(OSError, GraftworkError):  # a full disk costs time, not the model
            write_kept(path, _kept(made))
        # What is read has other names for values: a program is to be the same the first time.
        return _read(path, weight_of) or made


def _read(path: Path, weight_of: Callable[[str], Weight]) -> Imported | None:
    kept = read_kept(path)
    if kept is None:
        return None
    try:
        weights = parse_weights(kept.texts["weights"], kept.tensors, weight_of)
        function = parse_function(kept.texts["function"], WeightStore(weights), ALSO)
        return Imported(function, weights, json.loads(kept.texts["longest"]), {})
    except (GraftworkError, ValueError, KeyError, TypeError):
        return None


def _kept(trace: Imported) -> Kept:
    given = {name: origin for name, origin in trace.origins.items() if origin is not None}
    weights, tensors = weights_text(trace.weights, given)
    longest = json.dumps(trace.longest)
    return Kept(
        {"function": function_text(trace.fn), "weights": weights, "longest": longest}, tensors
    )
