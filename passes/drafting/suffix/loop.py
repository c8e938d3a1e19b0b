"""Copies inside an ONNX loop, and in onnxruntime-genai's."""

from __future__ import annotations

from typing import Any

import onnx_ir as oir

from ....backends.onnxruntime.chains_in_graph import Stepped, chain
from ....backends.onnxruntime.graph_builder import GraphBuilder
from ....backends.onnxruntime.steps_in_graph import Values
from . import SuffixDraft

MOST_DRAFTED, LONGEST_MATCH = 16, 16
"""Maximum draft length and match length of onnxruntime-genai."""


def genai(record: SuffixDraft) -> dict[str, Any]:
    """The closest settings of genai_config.json for these drafts."""
    tokens, match = min(record.tokens, MOST_DRAFTED), min(max(record.shortest, 2), LONGEST_MATCH)
    return {"speculative": {"max_draft_tokens": tokens, "ngram_size": match}}


@chain(SuffixDraft, genai=genai)
def copied(g: GraphBuilder, record: SuffixDraft, step: Stepped) -> tuple[oir.Value, Values]:
    """What followed the most recent of the longest earlier matches of the text's end, see the
    method: all lengths at once, at places of the last token alone."""
    text, zero, one = step.text, g.const(0), g.const(1)
    if step.source is not None:
        text = g.op("Concat", step.source, text, axis=0)
    length = g.size(text, 0)
    last = g.op("Sub", length, one)
    back = g.range(zero, g.const(record.longest))
    same = g.op("Equal", g.slice(text, None, last), g.slice(text, last, None))
    found = g.op("Squeeze", g.op("NonZero", same), g.const([0]))
    ends = g.op("Concat", g.const([-1]), found, axis=0)  # one of no match, so that there is one
    places = g.op("Sub", g.op("Unsqueeze", ends, g.const([1])), back)
    theirs = g.op("Gather", text, g.op("Max", places, zero))
    ours = g.op("Gather", text, g.op("Max", g.op("Sub", last, back), zero))
    alike = g.op("And", g.op("Equal", theirs, ours), g.op("GreaterOrEqual", places, zero))
    sizes = g.leading(alike, 1)
    best = g.op("ReduceMax", sizes, keepdims=0)
    which = g.op("ArgMax", sizes, axis=0, keepdims=0, select_last_index=1)
    place = g.op("Gather", ends, which)
    start = g.op("Add", place, one)
    count = g.op("Sub", length, start)
    turn = g.op("Mod", g.range(zero, g.const(record.tokens)), count)
    copy = g.op("Gather", text, g.op("Add", start, turn))
    enough = g.op("GreaterOrEqual", best, g.const(record.shortest))
    drafted = g.op("Where", enough, g.const(record.tokens), zero)
    return g.slice(copy, None, drafted), step.values
