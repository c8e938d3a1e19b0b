"""Streams learn the tokens of their places: future n-grams.

Source: Bhendawade et al., "Speculative Streaming: Fast LLM Inference without Auxiliary Models"
(2024): cross entropy of the next token and of each stream's, weighted. Which nodes have streams,
and what these see, is as of prompt tokens.
"""

from __future__ import annotations

from ....training.objectives.base import Batch, Loss, Run, objective
from ..ppd.objective import places_loss
from . import StreamDraft


@objective(StreamDraft)
def streams_loss(record: StreamDraft, run: Run, batch: Batch) -> Loss:
    """See the module docstring."""
    return places_loss(record, run, batch, None)
