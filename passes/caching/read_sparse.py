"""Let attention read the rows of a cache that count, and leave the others where they are.

Before, of each layer::

    func step(..., past: i64[B], kv.3.key: f32[B,G,C,64], kv.3.value: f32[B,G,C,64]) -> ... {
      %m: bool[B,1,T,C] = graftwork.step_mask(%past, %positions, None, C)
      %kw: f32[B,G,C,64] = graftwork.cache_write(%kv.3.key, %k, %past)
      %y: f32[B,H,T,64] = graftwork.attend(%q, %kw, %vw, %m, scale=0.125)

After (pick "attention", 6 layers): layer 2 reads everything and picks, layer 3 and those
behind it read what was picked, until another layer picks::

      %r: i64[B,G,T,256] = graftwork.top_rows(%q2, %kw2, %m, rows=256, picks=3, scale=0.125)
      %y: f32[B,H,T,64] = graftwork.attend_rows(%q, %kw, %vw, %r, scale=0.125)

After (pick "labels"): every layer picks for itself, by a few channels of its keys in 4 bits::

    state kv.3.label.codes: u8[B,G,C,4], state kv.3.label.steps: f32[B,G,C,2]
      %l: f32[B,G,T,8] = graftwork.take_channels(%k, @kv.3.channels)
      %s: (u8[B,G,T,4], f32[B,G,T,2]) = graftwork.quantize_rows(%l, bits=4, turned=False)
      ...
      %a: f32[B,H,T,8] = graftwork.take_channels(%q, @kv.3.channels)
      %r: i64[B,G,T,256] = graftwork.top_stored_rows(%a, %codes, %steps, %m, bits=4, rows=256,
          picks=3, scale=0.125)
      %y: f32[B,H,T,64] = graftwork.attend_rows(%q, %kw, %vw, %r, scale=0.125)

No row is lost: one that nobody looks at now may be read again later. Heads that share keys pick
together (by "groups"), as ShadowKV's do, and a row is read once for all of them; or each for itself
(by "heads"), as in the code of TidalDecode and Double Sparsity, and they may read as many times
more rows. Every token picks for itself, so that what it reads does not depend on what shares its
step. Prompts run through the function that there was, which reads all rows and writes labels
(prefill "full"), or read as what is generated does ("same"). All other functions that write a cache
of the step's read it so; one that lacks the layer that picks, picks where it first would read what
was picked. A draft's own cache is read as before.

Layers that look back over a sliding window read that.

Refuses caches that lose rows or store them in few bits; attention that weighs rows by their
distance (ALiBi); layers that would read rows picked under another mask, such as a chunk's; options
that leave no layer to read sparsely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import (
    Function,
    PassError,
    Program,
    arguments,
    type_of,
)
from ..engine.base import Effect, Evidence, Length, Outcome, TextSample, Windows, register
from ..engine.plan_edits import Prompts
from .cached_rows import Written, unbounded, written
from .contents import LearnedContents
from .picked_rows import attend_rows, check_sparse, prompts_apart
from .row_labels import BITS, Label, label_of, label_weights

A, G = torch.ops.aten, torch.ops.graftwork
FULL, PICKS = 2, 2
"""Layers that read all rows, and that pick by attention: of Yang et al., "TidalDecode" (2024)."""

Rows = Annotated[int, Field(ge=1, le=2**20)]
Some = Annotated[int, Field(ge=0, le=4096)]


@register
class ReadSparse(LearnedContents):
    """pick: by the attention that rows get where all are read, or by labels. rows: that a token
    reads of a cache. by: who picks these, heads that share keys together or each for itself. full:
    first layers that read all rows. picks: layers beyond these that pick, evenly apart, for those
    behind them, too; 0: each for itself. Unless they are given, by labels none reads all and each
    picks for itself, and by attention two read all and two pick, as in TidalDecode; where fewer
    than five layers see all rows, one picks, and as many read all as leave one that reads fewer.
    channels: of a key in its label, those that make the most of the products of queries and keys on
    text, of which `windows` of `length` tokens are read. prefill: prompts run through the function
    that there was, which reads all rows ("full"), or as what is generated does ("same")."""

    pick: Literal["attention", "labels"] = "labels"
    rows: Rows = 256
    by: Literal["groups", "heads"] = "groups"
    full: Some | None = None
    picks: Some | None = None
    channels: Annotated[int, Field(ge=2, le=256, multiple_of=2)] = 8
    prefill: Prompts = "full"
    windows: Windows = 4
    length: Length = 256

    effects: ClassVar[frozenset[Effect]] = LearnedContents.effects | {
        Effect.FUNCTIONS,
        Effect.DECODE_PLAN,
    }

    @property
    def bundled(self) -> bool:
        return True

    @property
    def text(self) -> TextSample | None:
        return self.sample if self.pick == "labels" else None

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """The same as `run`, with channels that are found on text."""
        return self._made(program, evidence.sampled(self.sample, program))

    def run(self, program: Program) -> Outcome:
        return self._made(program, None)

    def _made(self, program: Program, windows: torch.Tensor | None) -> Outcome:
        self.refuse_other(program, "which moves rows or drops them, and rows are picked among all")
        caches = unbounded(program.step, program)
        if not caches:
            return Outcome(program, 0, f"{program.step.name} has no attention that reads a cache")
        turns = self._turns(caches)
        for fn in program.functions.values():
            for write in written(fn, program):
                if write.keys.names[0] in turns:
                    check_sparse(self.name, write)
        labels = {} if windows is None else self._labels(program, caches, windows, turns)
        states = {s.name: s for label in labels.values() for s in label.states}
        program, full = prompts_apart(program, self.name, self.prefill)
        functions = {
            name: _Editor(fn.copy(), program, self, turns, labels, full=name == full).edited()
            for name, fn in program.functions.items()
        }
        made = program.replace(
            functions=functions,
            states={**program.states, **states},
            weights=program.weights.adding(*(label.weight for label in labels.values())),
        )
        matches = sum(turn is not None for turn in turns.values())
        return Outcome(made, matches, remarks=self._remarks(len(caches)))

    def _read_all(self, layers: int) -> tuple[int, int]:
        """Of so many that see all rows, `full` and `picks`."""
        full, picks = self.full, self.picks
        if self.pick == "labels":
            return full or 0, picks or 0
        if picks is None:
            picks = PICKS if layers > (FULL if full is None else full) + PICKS else 1
        return (max(min(FULL, layers - picks - 1), 0) if full is None else full), picks

    def _turns(self, caches: Sequence[Written]) -> dict[str, bool | None]:
        """By the state of a layer's keys: whether the layer picks, or reads what another one has
        picked; None: it reads all rows and picks none."""
        names = [cache.keys.names[0] for cache in caches]
        full, asked = self._read_all(len(names))
        left = len(names) - full
        picks = asked or left
        # By attention, the one that picks reads all rows: others must be left to gain by it.
        least = picks + (self.pick == "attention")
        if left < max(least, 1):
            raise PassError(
                f"{self.name}: of {len(names)} layers that see all rows, full={full} read all, and "
                f"pick={self.pick!r} with picks={asked} leaves none to read fewer: expected at "
                f"least {full + max(least, 1)} layers, or other options"
            )
        picking = {full + left * n // picks for n in range(picks)}
        return {name: None if n < full else n in picking for n, name in enumerate(names)}

    def _remarks(self, layers: int) -> tuple[str, ...]:
        full, picks = self._read_all(layers)
        fewer = self.full is None and full < FULL, self.picks is None and picks < PICKS
        if self.pick == "labels" or not any(fewer):
            return ()
        return (
            f"{layers} layers see all rows: full={full} of them read all, and picks={picks}, so "
            f"that {layers - full - picks} read fewer (where there are enough, full={FULL} and "
            f"picks={PICKS})",
        )

    def _labels(
        self,
        program: Program,
        caches: Sequence[Written],
        windows: torch.Tensor,
        turns: Mapping[str, bool | None],
    ) -> dict[str, Label]:
        """By the state of a layer's keys: what its label is."""
        weights, labels = label_weights(program, caches, windows), {}
        for cache, sizes in zip(caches, weights, strict=True):
            name = cache.keys.names[0]
            if not turns[name]:
                continue
            self.refuse(
                sizes.shape[1] < self.channels,
                f"keys of {cache.what} have {sizes.shape[1]} channels, fewer than "
                f"channels={self.channels}",
            )
            best = sizes.topk(self.channels, dim=1).indices.sort(dim=1).values
            labels[name] = label_of(program.states[name], best)
        return labels


@dataclass
class _Editor:
    """Changes a function, layer by layer. full: it reads all rows."""

    fn: Function
    program: Program
    options: ReadSparse
    turns: Mapping[str, bool | None]
    labels: Mapping[str, Label]
    full: bool = False
    picked: tuple[torch.fx.Node, Any] | None = None

    def edited(self) -> Function:
        """The function, changed where it reads a cache of the step's."""
        self.outputs = dict(self.fn.outputs)
        for write in list(written(self.fn, self.program)):
            turn = self.turns.get(write.keys.names[0])
            if turn is None:
                continue
            with self.fn.graph.inserting_before(write.attend):
                self._read(write, turn)
        self.fn.set_outputs(self.outputs)
        return self.fn

    def _read(self, write: Written, picks: bool) -> None:
        given, by_attention = arguments(write.attend), self.options.pick == "attention"
        label = self.labels.get(write.keys.names[0])
        stored = None if label is None else self._stored(write, label)
        if self.full:
            return
        if picks or self.picked is None:
            whose = given["k" if self.options.by == "groups" else "q"]
            how = {"rows": self.options.rows, "picks": type_of(whose).dims[1], **write.options}
            if stored is None or label is None:
                asked = given["q"], given["k"], given["mask"]
                rows = self.fn.call(G.top_rows.default, *asked, **how)
            else:
                few = self._taken(given["q"], label), *stored, given["mask"]
                rows = self.fn.call(G.top_stored_rows.default, *few, bits=BITS, **how)
            self.picked = rows, given["mask"]
            if by_attention:
                return
        rows, mask = self.picked
        self.options.refuse(
            mask is not given["mask"],
            f"{write.what} may see other rows than the layer before it that picks, such as those "
            f"of a chunk: set picks=0 with pick='labels', so that each layer picks for itself",
        )
        attend_rows(write, rows)

    def _taken(self, rows: Any, label: Label) -> torch.fx.Node:
        return self.fn.call(G.take_channels.default, rows, self.fn.weight(label.weight))

    def _stored(self, write: Written, label: Label) -> tuple[torch.fx.Node, ...]:
        """Labels of all rows, those of the step written: codes and steps."""
        fn = self.fn
        rows = self._taken(write.keys.new, label)
        new = fn.call(G.quantize_rows.default, rows, bits=BITS, turned=False)
        past = arguments(write.keys.writes[0])["past"]
        parts = []
        for index, state in enumerate(label.states):
            held = self.outputs.get(state.name) or fn.add_input(state.name, state.type)
            part = fn.call(G.cache_write.default, held, fn.item(new, index), past)
            self.outputs[state.name] = part
            parts.append(part)
        return tuple(parts)
