"""Chooses tokens of logits inside a graph, by numbers that the caller draws.

The repetition penalty, then temperature, top-k and top-p, as in `runtime.speculate.sampling`; what
is left is drawn from by inverting its cumulative distribution. ONNX's own Random ops have no
kernels any more, and runs would not repeat; here the same numbers give the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as oir

from .graph_builder import F32, I64, GraphBuilder


@dataclass(frozen=True)
class Sampling:
    """Inputs of the outermost graph: uniforms f32[B,N] in [0, 1), one a token; temperature f32[]
    (0: the likeliest token), top_k i64[] (0: all), top_p f32[], repetition_penalty f32[] (1: none;
    the scores of tokens that the text has are divided by it, or multiplied where they are negative:
    Keskar et al., "CTRL", 2019)."""

    uniforms: oir.Value
    temperature: oir.Value
    top_k: oir.Value
    top_p: oir.Value
    penalty: oir.Value

    @classmethod
    def inputs(cls, builder: GraphBuilder) -> Sampling:
        """Add the inputs to a graph."""
        return cls(
            builder.input("uniforms", F32, ["batch_size", "max_new"]),
            builder.input("temperature", F32, []),
            builder.input("top_k", I64, []),
            builder.input("top_p", F32, []),
            builder.input("repetition_penalty", F32, []),
        )


@dataclass(frozen=True)
class Draw:
    """What decides a step's tokens. uniforms: f32[B,S]. seen: bool[R,V], R = B S, the tokens of the
    text before each of them."""

    uniforms: oir.Value
    seen: oir.Value


def seen_after(g: GraphBuilder, text: oir.Value, draft: oir.Value, vocabulary: int) -> oir.Value:
    """bool[D+1,V]: the tokens of a text i64[L], and of it with more and more of a draft i64[D]."""
    rows = g.op("Add", g.size(draft, 0), g.const(1))
    shape = g.vector(rows, g.const(vocabulary))
    before = g.marked(g.flags(shape), g.op("Expand", text, g.vector(rows, g.size(text, 0))))
    # A token of the draft is seen from the row behind it on.
    whole = g.op("Expand", draft, g.vector(rows, g.size(draft, 0)))
    place = g.op("Unsqueeze", g.range(g.const(0), rows), g.const([1]))
    own = g.op("Less", g.range(g.const(0), g.size(draft, 0)), place)
    last = g.slice(text, g.const(-1), None)
    found: oir.Value = g.marked(before, g.op("Where", own, whole, last))
    return found


def _penalized(g: GraphBuilder, logits: oir.Value, seen: oir.Value, sampling: Sampling) -> Any:
    """Logits f32[R,V] after the repetition penalty."""
    negative = g.op("Less", logits, g.const(0.0, np.float32))
    less = g.op("Where", negative, g.op("Mul", logits, sampling.penalty),
                g.op("Div", logits, sampling.penalty))  # fmt: skip
    return g.op("Where", seen, less, logits)


def sampled(g: GraphBuilder, logits: oir.Value, draw: Draw, sampling: Sampling) -> oir.Value:
    """Tokens i64[R] of logits [R,V]."""
    wide, zero = g.cast(logits, F32), g.const(0.0, np.float32)
    wide = _penalized(g, wide, draw.seen, sampling)
    draws = g.op("Reshape", draw.uniforms, g.const([-1]))
    vocabulary = g.size(logits, 1)
    asked = g.op("Where", g.op("Greater", sampling.top_k, g.const(0)), sampling.top_k, vocabulary)
    # The largest first; without a top-k that is a sort, which top-p needs.
    kept, ids = g.op("TopK", wide, g.vector(g.op("Min", asked, vocabulary)), outputs=2)
    cold = g.op("LessOrEqual", sampling.temperature, zero)
    heat = g.op("Where", cold, g.const(1.0, np.float32), sampling.temperature)
    chances = g.op("Softmax", g.op("Div", kept, heat), axis=-1)
    reached = g.op("CumSum", chances, g.const(1))
    # A token stays if those before it do not make up the mass: the first always does.
    inside = g.op("Less", g.op("Sub", reached, chances), sampling.top_p)
    first = g.op("Equal", g.range(g.const(0), g.size(kept, 1)), g.const(0))
    mass = g.op("Where", g.op("Or", inside, first), chances, zero)
    whole = g.op("ReduceSum", mass, g.const([1]), keepdims=1)
    point = g.op("Mul", g.op("Unsqueeze", draws, g.const([1])), whole)
    passed = g.op("LessOrEqual", g.op("CumSum", mass, g.const(1)), point)
    # Rounding may let the point lie behind the last token that stays.
    last = g.op("Sub", g.total(g.op("Greater", mass, zero), 1), g.const(1))
    index = g.op("Min", g.total(passed, 1), last)
    index = g.op("Where", cold, g.const(0), index)
    picked = g.op("GatherElements", ids, g.op("Unsqueeze", index, g.const([1])), axis=1)
    found: oir.Value = g.op("Squeeze", picked, g.const([1]))
    return found
