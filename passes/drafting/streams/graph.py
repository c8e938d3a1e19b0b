"""Draft with streams that begin within the target and run beside a token's own.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=4, point="block")

After (prompts=2, last=3, rank=16), of six layers, with the first stream shown::

    weight streams.down.weight: f32[16,H]
    weight streams.up.weight: f32[H,16]
    weight streams.0.name: f32[H]
    weight streams.1.name: f32[H]
    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], draft_tokens i64[B,T,10], ... {
      ...
      %n: f32[B,T,H] = graftwork.followed_rows(%x, %o, None)
      %u: f32[B,T,H] = aten.linear(aten.linear(%n, @streams.down.weight), @streams.up.weight)
      %m: f32[B,T,H] = %n + %u + @streams.0.name
      %p: bool[B,T] = aten.eq.Scalar(%tokens, V)
      %y: f32[B,T,H] = aten.where.self(%p[..., None], %m, %x)
      %h: f32[B,T,H] = graftwork.hidden(%y, layer=2, point="block")
    decode {
      draft = streams(prompts=2, after=8, used=("streams.down.weight", ...), ...)

Behind the nodes of a draft where verification will likeliest end, the step is also fed the ids V,
V + 1, ... Before the last layers the state of each becomes the node's own, changed by a map of low
rank that all streams share, and by the stream's embedding. A stream then runs through these layers
by their own weights, attends to what the node attends to and to the node's earlier streams, and
what the head says after the k-th is the guess for the token k + 1 places after the node: the step
that verifies a draft makes the next one (Bhendawade et al., "Speculative Streaming: Fast LLM
Inference without Auxiliary Models", 2024). The paper trains the layers with them: `tune_target`.
What stands in a stream's place in earlier layers counts nothing, and its cache rows are forgotten.
Needs `accept_trees`, a chain of drafted tokens too. Refuses more layers than there are, and what
`draft_ppd` refuses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.fx

from ....ir import PassError, Program
from ....ir.execution.analysis import blocks_of
from ....ir.plan.bounds import Levels, Nodes
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..draft_pass import DraftPass
from ..grafts import candidates
from ..hidden_transfer.graph import pseudo_states
from . import StreamDraft

A = torch.ops.aten
NAME = "streams"


@builds(StreamDraft, aim="text")
class DraftStreams(DraftPass):
    """last: layers that streams run through, the last ones; as many as there are but one, where
    there are fewer. rank: of the map that begins them. The rest: see `DraftPass` and the record."""

    last: Levels = 4
    rank: Nodes = 16

    name: ClassVar[str] = "draft_streams"

    def insert(self, program: Program) -> Outcome:
        fn = program.step.copy()
        if "draft_tokens" in fn.outputs:
            raise PassError(f"{self.name}: the step drafts already")
        have = sorted(blocks_of(fn))
        if len(have) < 2:
            raise PassError(
                f"{self.name}: expected a model of two layers at least, between which streams "
                f"begin, got {len(have)}"
            )
        draft: StreamDraft = self.made()
        graft = self.graft(program, NAME, fn)
        layer = have[-1 - min(self.last, len(have) - 1)]

        def state(place: int, node: torch.fx.Node) -> torch.fx.Node:
            low = graft.linear(node, f"{NAME}.down", self.rank, bias=False)
            change = graft.linear(low, f"{NAME}.up", graft.hidden, bias=False, init="zeros")
            name = graft.parameter(f"{NAME}.{place}.name", graft.hidden, init="zeros")
            return graft.call(A.add.Tensor, graft.call(A.add.Tensor, node, change), name)

        size = program.info.vocab_size
        pseudo_states(fn, size, [layer] * draft.prompts, self.name, state)
        with fn.graph.inserting_before(fn.output_node):
            best = candidates(fn, fn.outputs["logits"], min(self.candidates, size))
        del best["draft_logits"]
        fn.set_outputs({**fn.outputs, **best})
        made = program.with_function(fn, weights=graft.weights)
        used = tuple(sorted(set(made.weights) - set(program.weights)))
        return Outcome(with_draft(made, replace(draft, used=used)), draft.prompts)
