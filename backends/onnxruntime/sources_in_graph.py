"""What texts are written from, inside a graph: its inputs, and the states that are made of it."""

from __future__ import annotations

import onnx_ir as oir

from ...ir import SOURCE, Program, type_of
from ...ir.plan import Encoded
from .emit import DTYPES
from .graph_builder import I64, GraphBuilder
from .steps_in_graph import Functions, Values


class SourceInputs:
    """The inputs of a graph for sources, of token ids or of features.

    ids i64[B,S], padded on the right, and lengths i64[B]; or features f[B,...], all of one size.
    """

    def __init__(self, g: GraphBuilder, program: Program, functions: Functions) -> None:
        source = program.plan.source
        assert isinstance(source, Encoded)
        self.record, self.program, self.functions = source, program, functions
        self.ids = self.features = None
        encoder = program.function(source.function)
        if encoder.has_input("features"):
            type = type_of(encoder.input("features"))
            sizes: list[int | str] = ["batch_size", *(int(str(dim)) for dim in type.dims[1:])]
            self.features = g.input("input_features", DTYPES[type.dtype], sizes)
            return
        self.ids = g.input("input_ids", I64, ["batch_size", "source_length"])
        self.lengths = g.checked_lengths(self.ids, g.input("lengths", I64, ["batch_size"]))

    @property
    def readable(self) -> bool:
        """Whether sources are texts of the vocabulary that texts are written in."""
        return 0 < self.record.vocabulary <= self.program.info.vocab_size

    def of(self, g: GraphBuilder, index: oir.Value) -> oir.Value | None:
        """The tokens i64[L] of one source, without padding; None where there are none."""
        if self.ids is None:
            return None
        padded = g.op("Gather", self.ids, index, axis=0)
        tokens: oir.Value = g.slice(padded, None, g.op("Gather", self.lengths, index))
        return tokens

    def together(self, g: GraphBuilder) -> Values:
        """States of all sources side by side."""
        if self.features is not None:
            return self._of_features(g, self.features)
        assert self.ids is not None
        return self._of_tokens(g, self.ids, self.lengths)

    def alone(self, g: GraphBuilder, index: oir.Value, tokens: oir.Value | None) -> Values:
        """States of one source; tokens: what `of` says of it."""
        if tokens is None:
            return self._of_features(g, g.op("Gather", self.features, g.vector(index), axis=0))
        row = g.op("Unsqueeze", tokens, g.const([0]))
        return self._of_tokens(g, row, g.vector(g.size(tokens, 0)))

    def _of_tokens(self, g: GraphBuilder, tokens: oir.Value, lengths: oir.Value) -> Values:
        batch, rows = g.size(tokens, 0), g.size(tokens, 1)
        positions = g.op("Expand", g.range(g.const(0), rows), g.op("Shape", tokens))
        given = {"tokens": tokens, "positions": positions, "lengths": lengths}
        return self._made(g, given, batch, rows)

    def _of_features(self, g: GraphBuilder, features: oir.Value) -> Values:
        batch, rows = g.size(features, 0), g.const(self.record.most)
        lengths = g.op("Expand", rows, g.vector(batch))
        return self._made(g, {"features": features, "lengths": lengths}, batch, rows)

    def _made(self, g: GraphBuilder, given: Values, batch: oir.Value, rows: oir.Value) -> Values:
        name, sizes = self.record.function, {"B": batch, SOURCE: rows}
        encoder = self.functions.of(name)
        states = [n for n in self.program.states if n in encoder.outputs]
        empty = {n: g.zeros(self.program.states[n].type, sizes) for n in states}
        outputs = self.functions.call(g, name, {**empty, **given})
        return {n: outputs[n] for n in states}
