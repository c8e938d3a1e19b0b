"""Let a step's logits say what the last layer knows more than earlier ones.

Before::

    %p: f32[B,S,H] = graftwork.pick_rows(%h7, %select)
    ... final norm and head on %p ... -> logits f32[B,S,V]

After (layers=[2, 4])::

    ... final norm and head on %p ... -> %last f32[B,S,V]
    %p2: f32[B,S,H] = graftwork.pick_rows(%h1, %select)
    ... final norm and head on %p2, and so on for four layers ...
    %early: f32[2,B,S,V] = aten.cat([%y2, %y4], 0)
    %y: f32[B,S,V] = graftwork.contrast_layers(%last, %early, plausible=0.1)

For each row the layer counts whose distribution is the farthest from the last one's. Drafts are
verified against these logits, so they change no text. The next token is decided by more products
with the head: one for each layer. Approximate: the text is another one, and is meant to be; logits
are no longer those of a language model's distribution, so divergences and perplexities of it say
little. transformers, where it had this method, also penalized repetition by 1.2.

Applies to every function of the target that returns logits. Refuses a layer that is not there, or
the last one, a program that chooses no tokens for its logits (`pick_logits`), and one whose head
reads more than the last layer's state.

Source: Chuang et al., "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language
Models" (2023, arXiv 2309.03883).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, cone, site_of
from ...ir.execution.analysis import blocks_of
from ..engine.base import Contract, Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_each

A, G = torch.ops.aten, torch.ops.graftwork
FIRST = 2
"""The lowest candidate: after fewer layers a state says little but the token itself."""


@register
class ContrastLayers(Pass):
    """layers: numbers of layers, counted from the first, after which a state is a candidate; or
    every second one of a half of the model: "low", for answers with reasoning, or "high", for
    short facts. plausible: share of the likeliest token's probability below which no token comes
    up."""

    layers: (
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=64)]
        | Literal["low", "high"]
    ) = "high"
    plausible: float = Field(default=0.1, ge=0, le=1)

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "picked"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.LOGITS})
    reads: ClassVar[frozenset[Effect]] = frozenset(Effect) - {
        *(Effect.LOGITS, Effect.DECODE_PLAN, Effect.SEGMENTS),
    }

    def run(self, program: Program) -> Outcome:
        return edit_each(program, self._contrast, TARGET)

    def _contrast(self, fn: Function) -> int | str:
        if "logits" not in fn.outputs:
            return f"{fn.name} returns no logits"
        logits, blocks = fn.outputs["logits"], blocks_of(fn)
        picked = [n for n in fn.calls(G.pick_rows.default) if n in cone([logits])]
        last = blocks[max(blocks)] if blocks else None
        if len(picked) != 1 or picked[0].args[0] is not last:
            return f"{fn.name}'s logits are no product of chosen rows of its last layer"
        early = [
            self._logits(fn, picked[0], blocks[number - 1])
            for number in self._candidates(sorted(blocks))
        ]
        with fn.graph.inserting_before(fn.output_node):
            rows = [fn.call(A.unsqueeze.default, one, 0, site=site_of(one)) for one in early]
            stack = fn.call(A.cat.default, rows, 0, site=site_of(logits))
            op, site = G.contrast_layers.default, site_of(logits)
            made = fn.call(op, logits, stack, plausible=self.plausible, site=site)
        fn.set_outputs({**fn.outputs, "logits": made})
        return len(early)

    def _candidates(self, layers: list[int]) -> tuple[int, ...]:
        """Numbers of layers. Errors: `PassError` for those that are not there."""
        count = len(layers)
        if self.layers == "low":
            numbers: tuple[int, ...] = tuple(range(min(FIRST, count - 1), count // 2, 2))
            numbers = numbers or tuple(range(1, count))[:1]
        elif self.layers == "high":
            numbers = tuple(range(max(count // 2, 1), count, 2))
        else:
            numbers = self.layers
        strange = [n for n in numbers if n - 1 not in layers[:-1]]
        if not numbers or strange or len(set(numbers)) < len(numbers):
            raise PassError(
                f"contrast_layers: layers={list(numbers)}: expected some of 1 to {count - 1}, each "
                f"once: the model has {count} layers, and the last is what they are contrasted with"
            )
        return tuple(sorted(numbers))

    def _logits(self, fn: Function, picked: torch.fx.Node, state: torch.fx.Node) -> torch.fx.Node:
        """What norm and head make of the chosen rows of a layer's state."""
        logits = fn.outputs["logits"]
        with fn.graph.inserting_before(fn.output_node):
            rows = fn.call(G.pick_rows.default, state, picked.args[1], site=site_of(state))
            copies = {picked: rows}
            for node in sorted(cone([logits], copies) - copies.keys()):
                if node.op == "placeholder" or picked not in cone([node]):
                    copies[node] = node
                else:
                    copies[node] = fn.graph.node_copy(node, lambda n: copies.get(n, n))
        return copies[logits]
