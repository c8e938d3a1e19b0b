"""Cut the step into segments that run one after the other, so that a step may stop between them.

Before::

    func step(tokens, positions, past, select, kv.0.key, ...) -> logits, argmax, kv.0.key, ... {
      ... layers 0 to 2 -> %h2 = graftwork.hidden(%x2, layer=2, point="block") ...
      ... layers 3 to 7 -> %h7 = graftwork.hidden(%x7, layer=7, point="block") ...
      %p: f32[B,S,H] = graftwork.pick_rows(%h7, %select)
      ... final norm and head on %p ...

After (exits=[3])::

    state stream: f32[B,1,C,H]
    func step: as it was
    func step.0(tokens, positions, past, kv.0.key, ..., stream) -> kv.0.key, ..., stream {
      ... layers 0 to 2 -> %h2 ...
      %w: f32[B,1,C,H] = graftwork.cache_write(%stream, %h2 as rows, %past)
    func step.1(positions, past, kv.3.key, ..., stream) -> kv.3.key, ..., stream {
      %h2: f32[B,T,H] = graftwork.cache_read(%stream, %past, 0 .. T-1)
      ... layers 3 to 7 -> %h7, written to the stream ...
    func step.head(past, select, stream) -> logits, argmax {
      %p: f32[B,S,H] = graftwork.cache_read(%stream, %past, %select)
      ... final norm and head on %p ...
    decode {
      step = segments(functions=("step.0", "step.1"), head="step.head", exits=(3,), layers=8)

An exit E is after E layers. With ``sublayers`` every layer is cut behind its attention, too. The
stream holds, of every token, the residual stream as deep as the token has been: a segment takes it
up where the one before has left it, whenever that was, and the head reads it at any depth. So
segments may be left out, or made up for later, for rows of their choice. What the step returns
beside the logits comes from the segment that computes it.

`step` stays for training and for the validator; the decode loop runs the segments alone. This
changes no result. Runs when everything else is done to the step, but before `fuse_residual_norm`,
which pulls a layer's first norm into the layer before. Refuses exits where there is no layer, or
none behind them; sublayers of blocks that have no state between attention and MLP; steps that
choose no logits (`pick_logits`), that do more than the target's work (`fuse_draft`) or are cut
already; and, naming it, whatever reads states on both sides of a cut, such as attention that shares
another layer's keys, or an output made of several layers' states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, State, Sym, TensorType, cone, site_of, type_of
from ...ir.execution.analysis import blocks_of
from ...ir.plan import Segments, Whole
from ...ir.plan.inputs import INPUTS
from ...ir.rewrite.cleanup import sweep
from ..engine.base import Effect, Outcome, Pass, register

A, G = torch.ops.aten, torch.ops.graftwork
STREAM = "stream"

Exits = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(max_length=512)]


@register
class CutDepth(Pass):
    """exits: numbers of layers, counted from the first, after which the step is cut. every: cut it
    behind every so many layers instead. middle: or before and behind so large a share of the
    layers, in the middle. sublayers: and behind each layer's attention."""

    exits: Exits = ()
    every: int = Field(default=0, ge=0)
    middle: float = Field(default=0.0, ge=0, lt=1)
    sublayers: bool = False

    name: ClassVar[str] = "cut_depth"
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "picked"})
    provides: ClassVar[frozenset[str]] = frozenset({"segments"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.SEGMENTS})
    reads: ClassVar[frozenset[Effect]] = frozenset(Effect) - {
        Effect.SEGMENTS,
        Effect.DECODE_PLAN,
    }

    def run(self, program: Program) -> Outcome:
        plan, step = program.plan, program.step
        if program.recurrent:
            raise PassError(
                f"{self.name}: {program.name} has recurrences, whose states cannot go back to "
                "where a draft of the first layers began, or wait for deeper layers: cut models "
                "made of attention"
            )
        if plan.step != Whole(step.name) or STREAM in program.states:
            raise PassError(
                f"{self.name}: expected a plan whose step is one function that is not cut yet, got "
                f"step={plan.step.brief}: leave the other pass out that changes it, such as "
                f"fuse_draft, or set its prefill='same' (skip_layers, read_sparse, read_chunks)"
            )
        cutter = Cutter(step.copy(), self.name, STREAM)
        exits = self._exits(cutter)
        within = tuple(sorted(cutter.blocks)) if self.sublayers else ()
        parts = cutter.parts(exits, within)
        *segments, head = parts
        record = Segments(
            functions=tuple(part.name for part in segments),
            plain=step.name,
            head=head.name,
            exits=exits,
            within=within,
            layers=len(cutter.blocks),
        )
        functions = {**program.functions, **{part.name: part for part in parts}}
        states = {**program.states, STREAM: cutter.state}
        cut = program.replace(functions=functions, states=states, plan=replace(plan, step=record))
        return Outcome(cut, len(exits) + len(within))

    def _exits(self, cutter: Cutter) -> tuple[int, ...]:
        """Where to cut. Errors: `PassError` for exits that are named twice, and for none."""
        if sum(map(bool, (self.exits, self.every, self.middle))) != 1:
            raise PassError(
                f"{self.name}: say where to cut: set exits, every or middle, one of them"
            )
        layers = sorted(cutter.blocks)
        exits = self.exits
        if self.every:
            exits = tuple(layer + 1 for layer in layers[:-1])[self.every - 1 :: self.every]
        elif self.middle:
            exits = around(len(layers), self.middle)
        if not exits:
            asked = f"every={self.every}" if self.every else f"middle={self.middle:g}"
            raise PassError(f"{self.name}: {asked} leaves {len(layers)} layers in one piece")
        if len(set(exits)) < len(exits):
            raise PassError(f"{self.name}: exits={list(exits)} names an exit twice")
        return tuple(sorted(exits))


def around(layers: int, share: float) -> tuple[int, ...]:
    """The exits before and behind a share of the layers, in the middle; () where nothing is left to
    cut out.

    >>> around(8, 0.5), around(5, 0.4), around(2, 0.5)
    ((2, 6), (1, 3), ())
    """
    inner = min(max(round(share * layers), 1), layers - 2)
    before = (layers - inner) // 2
    return (before, before + inner) if inner > 0 else ()


class Cutter:
    """Takes a function that ends in a head to pieces. stream: the state between them, of a class of
    states with a row for each token (`State.capacity`).

    blocks: the values behind its layers, by the layer's number. state: the stream. Errors:
    `PassError` naming `owner` for a function without markers of layers.
    """

    def __init__(self, fn: Function, owner: str, stream: str, capacity: str = "C") -> None:
        self.fn, self.owner = fn, owner
        sweep(fn)
        self.markers = fn.calls(G.hidden.default)
        self.blocks = blocks_of(fn)
        if not self.blocks:
            raise PassError(f"{owner}: {fn.name} has no graftwork.hidden marker of a block")
        last = type_of(self.markers[-1])
        dims = (Sym("B"), 1, Sym(capacity), last.dims[-1])
        self.state = State(stream, TensorType(last.dtype, dims), 0, "hidden")

    def parts(self, exits: Sequence[int], within: Sequence[int]) -> list[Function]:
        """The segments in order, and the head."""
        cuts = [self._cut(exit) for exit in exits] + [self._half(layer) for layer in within]
        cuts.sort(key=self.markers.index)
        cuts.append(self.markers[-1])
        picks = [node for node in cuts[-1].users if node.target is G.pick_rows.default]
        outputs = self._shared_out(cuts)
        parts = []
        for index, cut in enumerate(cuts):
            name = f"{self.fn.name}.{index}"
            given = {cuts[index - 1]: _fed_rows} if index else {}
            made = {**outputs[index], self.state.name: cut}
            part = _piece(self.fn, name, made, given, self.state)
            self._check_apart(part, cuts[:index], cut)
            parts.append(_writing(part, self.state))
        given = dict.fromkeys(picks, _chosen_rows)
        head = _piece(self.fn, f"{self.fn.name}.head", outputs[-1], given, self.state)
        self._check_apart(head, cuts, None)
        return [*parts, head]

    def _cut(self, exit: int) -> torch.fx.Node:
        """The state after so many layers. Errors: `PassError` for an exit that there is not."""
        layers = sorted(self.blocks)
        possible = [layer + 1 for layer in layers[:-1]]
        if exit not in possible:
            raise PassError(
                f"{self.owner}: there is no exit after {exit} layers; expected one of "
                f"{', '.join(map(str, possible)) or 'none: there is one layer'} (the step has the "
                f"layers {', '.join(map(str, layers))}, and one must be left behind the exit)"
            )
        return self.blocks[exit - 1]

    def _half(self, layer: int) -> torch.fx.Node:
        """The state between a layer's attention and its MLP. Errors: `PassError` without one."""
        for node in self.markers:
            if _place(node) == (layer, "attention"):
                return node
        raise PassError(
            f"{self.owner}: layer {layer} has no state between its attention and its MLP, as where "
            f"the two run side by side: leave sublayers out"
        )

    def _shared_out(self, cuts: Sequence[torch.fx.Node]) -> list[dict[str, torch.fx.Node]]:
        """The step's outputs by who makes them: a segment each, and the head."""
        shares: list[dict[str, torch.fx.Node]] = [{} for _ in range(len(cuts) + 1)]
        select = self.fn.input("select")
        for name, node in self.fn.outputs.items():
            needed = cone([node])
            behind = sum(cut in needed for cut in cuts) - (node in cuts)
            if behind == len(cuts) and select not in needed:
                behind -= 1  # of every token: the last segment has them
            shares[behind][name] = node
        return shares

    def _check_apart(
        self, part: Function, before: Sequence[torch.fx.Node], cut: torch.fx.Node | None
    ) -> None:
        """That a part reads nothing that an earlier one makes, but the stream."""
        first = self.markers.index(before[-1]) + 1 if before else 0
        last = len(self.markers) if cut is None else self.markers.index(cut) + 1
        known = {_place(node) for node in self.markers[first:last]}
        for node in part.calls(G.hidden.default):
            if _place(node) not in known:
                guilty = [name for name, value in part.outputs.items() if node in cone([value])]
                raise PassError(
                    f"{self.owner}: {', '.join(guilty)} of {part.name} also need the state of "
                    f"layer {node.kwargs['layer']} ({node.kwargs['point']}), which is before the "
                    f"cut: cut elsewhere, or leave out the pass that reads it"
                )


def _place(marker: torch.fx.Node) -> tuple[object, object]:
    return marker.kwargs["layer"], marker.kwargs["point"]


Known = Callable[[Function, torch.fx.Node], torch.fx.Node]
"""Makes, in a part, what stands there for a value of the step."""


def _piece(
    fn: Function,
    name: str,
    outputs: Mapping[str, torch.fx.Node],
    given: Mapping[torch.fx.Node, Known],
    state: State,
) -> Function:
    """A function that computes these values of `fn`, some of its other values being known."""
    needed = cone(outputs.values(), given) - given.keys()
    part = Function(name, role=fn.role)
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in fn.inputs:
        wanted = node in needed or node.target == "past"
        if wanted or (node.target == "select" and _chosen_rows in given.values()):
            values[node] = part.graph.node_copy(node)
    stream = part.add_input(state.name, state.type)
    for node, known in given.items():
        values[node] = known(part, stream)
    for node in fn:
        if node in needed and node not in values:
            values[node] = part.graph.node_copy(node, lambda n: values[n])
    part.set_outputs({name: values[node] for name, node in outputs.items()})
    return part


def _fed_rows(part: Function, stream: torch.fx.Node) -> torch.fx.Node:
    """The rows of a step's tokens, f[B,T,H]."""
    if not part.has_input("positions"):
        part.add_input("positions", INPUTS["positions"].type)  # it says how many there are
    count = part.call(A.arange.start_step, 0, Sym("T"), 1, dtype=torch.int64)
    row = part.call(A.unsqueeze.default, count, 0)
    columns = part.call(A.expand.default, row, [Sym("B"), Sym("T")])
    return part.call(G.cache_read.default, stream, part.input("past"), columns)


def _chosen_rows(part: Function, stream: torch.fx.Node) -> torch.fx.Node:
    """The rows of the chosen tokens, f[B,S,H]."""
    past, select = part.input("past"), part.input("select")
    return part.call(G.cache_read.default, stream, past, select)


def _writing(part: Function, state: State) -> Function:
    """The segment, with the values that it returns as the stream written into it."""
    outputs = part.outputs
    rows = outputs[state.name]
    with part.graph.inserting_before(part.output_node):
        column = part.call(A.unsqueeze.default, rows, 1, site=site_of(rows))
        past = part.input("past")
        written = part.call(G.cache_write.default, part.input(state.name), column, past)
    part.set_outputs({**outputs, state.name: written})
    return part
