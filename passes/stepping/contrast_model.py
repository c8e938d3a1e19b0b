"""Let a step's logits say what the model knows more than a weaker one, the amateur.

Before::

    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V] {
      ... layers, final norm and head ... -> %y f32[B,T,V]

After (model="path")::

    weight amateur.layers.0.q: f32[32,32] ...
    func step(tokens: i64[B,T], positions: i64[B,T]) -> logits f32[B,T,V] {
      ... the amateur's layers, norm and head, on the same tokens ... -> %z f32[B,T,V]
      ... layers, final norm and head ... -> %y f32[B,T,V]
      %s: f32[1,B,T,V] = aten.unsqueeze(%z, 0)
      %c: f32[B,T,V] = graftwork.contrast_layers(%y, %s, plausible=0.1)

With p the model's distribution and q the amateur's, the logits are, for tokens with at least
`plausible` times the likeliest one's p,

    keep log p + weight (log p - log q) + lower (log p' - log q')

and 10,000 less for all others. q is that of the amateur's logits over `temperature`. p' and q' are
what the heads make of a lower layer's state of each model, if that counts (`lower`).

The amateur becomes part of the step: it has caches of its own rows, trees and drafts come to it as
to the model, fusions and numerics too, and drafts are verified against the contrast, so that they
change no text. Approximate: the text is another one, and is meant to be. Tokens that the amateur's
vocabulary lacks are as unlikely to it as its least likely one, and texts end where its positions
do. Refuses what `draft_model` refuses of a model, models that write from a source, a step that is
cut, and layers that are not there.

Sources: Li et al., "Contrastive Decoding: Open-ended Text Generation as Optimization" (2023), with
keep=0 and weight=1; O'Brien and Lewis, "Contrastive Decoding Improves Reasoning in Large Language
Models" (2023), with keep=1 and weight=0.5; Chen et al., "Lower Layer Matters: Alleviating
Hallucination via Multi-Layer Fusion Contrastive Decoding with Truthfulness Refocused" (LOL, 2024),
for lower layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, Role, cone, site_of, type_of
from ...ir.execution.analysis import blocks_of
from ...ir.ops.marker import HEAD
from ...ir.plan.bounds import Amount, Factor, Share
from ...ir.rewrite.subgraph import inlined
from ..drafting.guest_step import guest_beside, tokenizer_remarks, with_step_of
from ..engine.base import STATES, Contract, Effect, Outcome, Pass, register

A, G = torch.ops.aten, torch.ops.graftwork
NAME = "amateur"

Layer = Annotated[int, Field(ge=1, le=4096)]


@register
class ContrastModel(Pass):
    """model: the amateur, a checkpoint folder or .gguf file with the model's tokens. keep: the
    weight of the model's own scores; weight: of the contrast; lower: of that of lower layers; 0:
    none. temperature: that the amateur's logits are divided by. plausible: share of the likeliest
    token's probability below which no token comes up. layer: the lower layer, counted from the
    first; none: half of them, in either model. amateur_layer: the same of the amateur; none: as far
    up as the model's."""

    model: str = ""
    keep: Amount = 0.0
    weight: Factor = 1.0
    lower: Amount = 0.0
    temperature: Factor = 1.0
    plausible: Share = 0.1
    layer: Layer | None = None
    amateur_layer: Layer | None = None

    name: ClassVar[str] = "contrast_model"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS, Effect.FUNCTIONS})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS, Effect.SEGMENTS}
    brings: ClassVar[str] = "an amateur model"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model,)

    @property
    def moot(self) -> frozenset[str]:
        return frozenset() if self.lower else frozenset({"layer", "amateur_layer"})

    def run(self, program: Program) -> Outcome:
        guest = guest_beside(program, self.model, self.name, NAME)
        if guest.plan.source.encoder or program.plan.source.encoder:
            raise PassError(
                f"{self.name}: {program.name} and {guest.name}: expected decoder-only models, got "
                f"one that writes from a source"
            )
        known = program.guests[self.model].info.vocab_size
        both = with_step_of(program, guest, self.model, NAME, Role.TARGET)
        fn, body = both.step.copy(), both.functions[NAME].copy()
        if strange := [n.target for n in body.inputs if not fn.has_input(str(n.target))]:
            raise PassError(
                f"{self.name}: {guest.name} is fed {strange[0]}, which {program.name} is not: "
                f"choose a model of the same family"
            )
        theirs = self._amateur(fn, body)
        lower = self._lower(fn, body, theirs)
        with fn.graph.inserting_before(fn.output_node):
            made = self._fused(fn, theirs["logits"], lower, known)
        fn.set_outputs({**fn.outputs, "logits": made})
        functions = {n: f for n, f in both.functions.items() if n != NAME} | {fn.name: fn}
        short = min(program.info.context, guest.info.context)
        info = replace(program.info, context=short)
        remarks = tokenizer_remarks(program, guest)
        if short < program.info.context:
            remarks += (f"texts end at {short:,} tokens, where the amateur's positions do",)
        return Outcome(both.replace(functions=functions, info=info).pruned(), 1, remarks=remarks)

    def _amateur(self, fn: Function, body: Function) -> dict[str, torch.fx.Node]:
        """What the amateur's step returns, computed in the model's, before all else: a function's
        last marker is still the model's. Of its own markers those stay that heads read."""
        blocks = list(blocks_of(body).values())
        if not blocks:
            raise PassError(f"{self.name}: the amateur's step has no graftwork.hidden marker")
        read = {blocks[-1]}
        if self.lower:
            at = self._layer(len(blocks_of(fn)), self.layer, "layer")
            part = max(1, min(round(at / len(blocks_of(fn)) * len(blocks)), len(blocks) - 1))
            mine = self.amateur_layer or part
            low = blocks[self._layer(len(blocks), mine, "amateur_layer") - 1]
            body.set_outputs({**body.outputs, "lower": _head_of(body, low, blocks[-1])})
        for node in body.calls(G.hidden.default):
            if node in read:
                node.kwargs = {**node.kwargs, "point": HEAD}
            elif node.kwargs["point"] != HEAD:
                body.replace(node, node.all_input_nodes[0])
        with fn.graph.inserting_before(fn.calls()[0]):
            return inlined(fn, body, {n: fn.input(str(n.target)) for n in body.inputs}, {})

    def _lower(
        self, fn: Function, body: Function, theirs: dict[str, torch.fx.Node]
    ) -> tuple[torch.fx.Node, torch.fx.Node] | None:
        """Logits of a lower layer of each model."""
        if not self.lower:
            return None
        blocks = list(blocks_of(fn).values())
        low = blocks[self._layer(len(blocks), self.layer, "layer") - 1]
        return _head_of(fn, low, blocks[-1]), theirs["lower"]

    def _layer(self, count: int, asked: int | None, option: str) -> int:
        """The number of a lower layer, of so many. Errors: `PassError` if it is not there."""
        number = asked or max(1, count // 2)
        if not 1 <= number < count:
            raise PassError(
                f"{self.name}: {option}={number}: expected 1 to {count - 1}: the model has {count} "
                f"layers, and the last is contrasted in any case"
            )
        return number

    def _fused(
        self,
        fn: Function,
        theirs: torch.fx.Node,
        lower: tuple[torch.fx.Node, torch.fx.Node] | None,
        known: int,
    ) -> torch.fx.Node:
        ours = fn.outputs["logits"]
        total = self._contrast(fn, ours, theirs, self.plausible, known)
        if self.weight != 1:
            total = fn.call(A.mul.Tensor, total, self.weight)
        if self.keep:
            own = fn.call(A._to_copy.default, ours, dtype=torch.float32)
            own = fn.call(A._log_softmax.default, own, -1, False)
            total = fn.call(A.add.Tensor, total, fn.call(A.mul.Tensor, own, self.keep))
        if lower is not None:
            more = self._contrast(fn, *lower, 0.0, known)
            total = fn.call(A.add.Tensor, total, fn.call(A.mul.Tensor, more, self.lower))
        return total

    def _contrast(
        self, fn: Function, ours: torch.fx.Node, theirs: torch.fx.Node, plausible: float, known: int
    ) -> torch.fx.Node:
        if known < int(str(type_of(theirs).dims[-1])):
            least = fn.call(A.slice.Tensor, theirs, -1, 0, known)
            theirs = fn.call(A.maximum.default, theirs, fn.call(A.amin.default, least, [-1], True))
        if self.temperature != 1:
            theirs = fn.call(A.div.Tensor, theirs, self.temperature)
        rows = fn.call(A.unsqueeze.default, theirs, 0)
        site = site_of(ours)
        return fn.call(G.contrast_layers.default, ours, rows, plausible=plausible, site=site)


def _head_of(fn: Function, state: torch.fx.Node, last: torch.fx.Node) -> torch.fx.Node:
    """What norm and head, which make logits of the `last` state, make of another (in place)."""
    logits = fn.outputs["logits"]
    with fn.graph.inserting_after(state):
        marked = fn.call(
            G.hidden.default, state, layer=state.kwargs["layer"], point=HEAD, site=site_of(state)
        )
    copies = {last: marked}
    with fn.graph.inserting_before(fn.output_node):
        for node in sorted(cone([logits], copies) - copies.keys()):
            if node.op == "placeholder" or last not in cone([node]):
                copies[node] = node
            else:
                copies[node] = fn.graph.node_copy(node, lambda n: copies.get(n, n))
    return copies[logits]
