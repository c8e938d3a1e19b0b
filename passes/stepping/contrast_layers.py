"""Let a step's logits say what the last layer knows more than earlier ones.

Before::

    %p: f32[B,S,H] = graftwork.pick_rows(%h7, %select)
    ... final norm and head on %p ... -> logits f32[B,S,V]

After (layers=[2, 4])::

    %p2: f32[B,S,H] = graftwork.pick_rows(%h1, %select)
    %p4: f32[B,S,H] = graftwork.pick_rows(%h3, %select)
    %x: f32[3,B,S,H] = aten.stack([%p, %p2, %p4])
    ... final norm and head on %x ... -> %all f32[3,B,S,V]
    %last: f32[B,S,V] = aten.select(%all, 0, 0)
    %early: f32[2,B,S,V] = aten.slice(%all, 0, 1, 3)
    %y: f32[B,S,V] = graftwork.contrast_layers(%last, %early, plausible=0.1)

For each row the layer counts whose distribution is the farthest from the last one's. Drafts are
verified against these logits, so they change no text. One product with the head makes the logits
of all layers, so its weight is read once; where something between rows and logits is no matter of
single rows, each layer has a product of its own. Approximate: the text is another one, and is meant
to be; logits are no longer those of a language model's distribution, so divergences and
perplexities of it say little. transformers, where it had this method, also penalized repetition by
1.2.

Applies to every function of the target that returns logits. Refuses a layer that is not there, or
the last one, a program that chooses no tokens for its logits (`pick_logits`), and one whose head
reads more than the last layer's state.

Source: Chuang et al., "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language
Models" (2023, arXiv 2309.03883).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

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
        states = [blocks[number - 1] for number in self._candidates(sorted(blocks))]
        site, read = site_of(logits), _behind(logits, picked[0])
        with fn.graph.inserting_before(fn.output_node):
            if all(by_row(node) for node in read):
                rows = [picked[0], *(_picked(fn, picked[0], state) for state in states)]
                every = _again(fn, read, {picked[0]: _stacked(fn, rows)})
                last = fn.call(A.select.int, every, 0, 0, site=site)
                early = fn.call(A.slice.Tensor, every, 0, 1, len(rows), site=site)
            else:
                copies = [{picked[0]: _picked(fn, picked[0], state)} for state in states]
                last = logits
                early = _stacked(fn, [_again(fn, read, copy) for copy in copies])
            op = G.contrast_layers.default
            made = fn.call(op, last, early, plausible=self.plausible, site=site)
        fn.set_outputs({**fn.outputs, "logits": made})
        return len(states)

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


def by_row(node: torch.fx.Node) -> bool:
    """Whether each row of the result depends on that row alone, whatever axes stand before it."""
    products = (A.linear.default, G.quantized_linear.default)
    norms = (G.rms_norm.default, G.layer_norm.default)
    tags = getattr(node.target, "tags", ())
    return node.target in (*products, *norms) or torch.Tag.pointwise in tags


def _behind(logits: torch.fx.Node, picked: torch.fx.Node) -> list[torch.fx.Node]:
    """What makes logits of rows, in order."""
    there = sorted(cone([logits], {picked}) - {picked})
    return [node for node in there if picked in cone([node])]


def _picked(fn: Function, like: torch.fx.Node, state: torch.fx.Node) -> torch.fx.Node:
    """The chosen rows of a layer's state."""
    return fn.call(G.pick_rows.default, state, like.args[1], site=site_of(state))


def _stacked(fn: Function, nodes: Sequence[torch.fx.Node]) -> torch.fx.Node:
    """Nodes [...] as one [J,...]."""
    rows = [fn.call(A.unsqueeze.default, node, 0, site=site_of(node)) for node in nodes]
    return fn.call(A.cat.default, rows, 0, site=site_of(nodes[0]))


def _again(
    fn: Function, nodes: Sequence[torch.fx.Node], copies: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node:
    """The last of some nodes, made anew of what stands for others."""
    for node in nodes:
        args: Any = torch.fx.map_arg(node.args, lambda n: copies.get(n, n))
        options: Any = torch.fx.map_arg(node.kwargs, lambda n: copies.get(n, n))
        assert callable(node.target)
        copies[node] = fn.call(node.target, *args, site=site_of(node), **options)
    return copies[nodes[-1]]
