"""Draft with states of tokens to come, mapped from a token's own within the target.

Before::

    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V] {
      %h: f32[B,T,H] = graftwork.hidden(%x, layer=4, point="block")

After (prompts=2, layers=(4, 5)), with the first map shown::

    weight hidden_transfer.0.weight: f32[H,H]
    weight hidden_transfer.1.weight: f32[H,H]
    func step(tokens: i64[B,T], ...) -> logits f32[B,T,V], draft_tokens i64[B,T,10], ... {
      %o: bool[B,T] = aten.lt.Scalar(%tokens, V)
      ...
      %n: f32[B,T,H] = graftwork.followed_rows(%x, %o, None)
      %m: f32[B,T,H] = aten.linear(%n, @hidden_transfer.0.weight)
      %p: bool[B,T] = aten.eq.Scalar(%tokens, V)
      %y: f32[B,T,H] = aten.where.self(%p[..., None], %m, %x)
      %h: f32[B,T,H] = graftwork.hidden(%y, layer=4, point="block")
    decode {
      draft = transfer(prompts=2, after=8, maps=("hidden_transfer.0.weight", ...), ...)

Behind the nodes of a draft where verification will likeliest end, the step is also fed the ids V,
V + 1, ... After a layer the state of each becomes a linear map of the state of the node that it
stands behind, its pseudo state; it goes through the layers that are left, attending to what the
node attends to and to the pseudo states before it, and what the target's head says after the k-th
is the guess for the token k + 1 places after the node. So the next draft is made in the step that
verifies this one (Wu et al., "Parallel Decoding via Hidden Transfer for Lossless Large Language
Model Acceleration", 2024). What stands in a pseudo state's place in earlier layers counts nothing,
its cache rows are forgotten, and no other token sees them. New maps pass the state on as it is:
train them with `graftwork train`. Needs `accept_trees`, a chain of drafted tokens too. Refuses
another number of layers than of pseudo states, layers that the program does not have, or in another
order than ascending, and what `draft_ppd` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.fx

from ....ir import Function, PassError, Program
from ....ir.execution.analysis import blocks_of
from ....ir.plan.bounds import Place
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import builds
from ..draft_pass import DraftPass
from ..grafts import candidates
from ..prompt_tokens import clamped_tokens
from . import TransferDraft

A, G = torch.ops.aten, torch.ops.graftwork
NAME = "hidden_transfer"


@builds(TransferDraft, aim="distribution", decay=1.0)
class DraftHiddenTransfer(DraftPass):
    """layers: for each pseudo state, the one after which it is made; none given: one after the
    other, from two thirds of the depth on. The rest: see `DraftPass` and the record."""

    layers: tuple[Place, ...] = ()

    name: ClassVar[str] = "draft_hidden_transfer"

    def insert(self, program: Program) -> Outcome:
        fn = program.step.copy()
        if "draft_tokens" in fn.outputs:
            raise PassError(f"{self.name}: the step drafts already")
        draft: TransferDraft = self.made()
        maps = tuple(f"{NAME}.{place}.weight" for place in range(draft.prompts))
        graft = self.graft(program, NAME, fn)
        layers = self._layers(fn, draft.prompts)
        size = program.info.vocab_size

        def state(place: int, node: torch.fx.Node) -> torch.fx.Node:
            return graft.linear(node, f"{NAME}.{place}", graft.hidden, bias=False, init="eye")

        pseudo_states(fn, size, layers, self.name, state)
        with fn.graph.inserting_before(fn.output_node):
            best = candidates(fn, fn.outputs["logits"], min(self.candidates, size))
        del best["draft_logits"]
        fn.set_outputs({**fn.outputs, **best})
        made = program.with_function(fn, weights=graft.weights)
        return Outcome(with_draft(made, replace(draft, maps=maps)), draft.prompts)

    def _layers(self, fn: Function, count: int) -> tuple[int, ...]:
        """The layer after which each pseudo state is made."""
        have = sorted(blocks_of(fn))
        if not self.layers:
            first = max(0, min(2 * len(have) // 3, len(have) - 1 - count))
            return tuple(have[min(first + place, len(have) - 1)] for place in range(count))
        if (
            len(self.layers) != count
            or not set(self.layers) <= set(have)
            or list(self.layers) != sorted(self.layers)
        ):
            raise PassError(
                f"{self.name}: layers={self.layers}: expected {count} layers for "
                f"prompts={count}, ascending, of {', '.join(map(str, have))}"
            )
        return self.layers


def pseudo_states(
    fn: Function,
    size: int,
    layers: Sequence[int],
    owner: str,
    state: Callable[[int, torch.fx.Node], torch.fx.Node],
) -> None:
    """Let the ids size, size + 1, ... stand for states that begin after layers, one each, in place.

    state: what the place-th one is, made of the states f[B,T,H] of the tokens that they follow.
    Errors: `PassError` naming `owner` for a step that uses its tokens otherwise.
    """
    tokens = fn.input("tokens")
    known = clamped_tokens(fn, size, owner)
    with fn.graph.inserting_after(known):
        own = fn.call(A.lt.Scalar, tokens, size)
    for place, layer in enumerate(layers):
        marker = blocks_of(fn)[layer]
        stream = marker.all_input_nodes[0]
        with fn.graph.inserting_before(marker):
            node = fn.call(G.followed_rows.default, stream, own, None)
            made = state(place, node)
            here = fn.call(A.eq.Scalar, tokens, size + place)
            here = fn.call(A.unsqueeze.default, here, -1)
            marker.update_arg(0, fn.call(A.where.self, here, made, stream))
