"""Feeding the step function: ragged token lists in, outputs out, with buffers made once a width."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import eq
from time import perf_counter
from typing import NamedTuple

import torch

from ...ir import LOG, InputError, Program, UnsupportedError
from ...ir.execution.executable import ANY, Executable
from ...ir.plan import Pictures
from ...ir.plan.held import Latest
from ...ir.plan.inputs import INPUTS, OPTIONAL, PACKED, mixed_into
from ...ir.plan.source import EMBEDS, STATES
from ..asking.text import Mixture
from .calls import run_in_turn
from .draft import Draft
from .gather import joined, widened
from .outputs import Outputs
from .step_inputs import StepInputs

CHUNK = 512
"""Tokens a prefill feeds at once at most where any number can be."""

READING = 64
"""Columns of a step whose arithmetic takes about as long as reading the weights, which every step
does once. Exactness does not matter: it only decides how a prompt is cut into steps."""

SHAPES = 1024
"""Shapes of steps whose memory is kept, at most: packed ones have many numbers of tokens."""

CHOSEN = frozenset({"logits", "argmax", "top_tokens", STATES})
"""Outputs that are wanted of chosen tokens only, whether the step can choose or not."""


class StepFeed(NamedTuple):
    """What a step is fed: `rows[b]` behind `past[b]` cache rows, at positions from `starts[b]` on.

    fetch: the outputs that are wanted; each has `width` columns (0: as few as hold the rows).
    trees: the drafts of which `rows` are the last committed token and the nodes, if one of them
    branches. mixes: what is mixed into each row's first token. single: each row is one token known
    to the model, and there is room for it (see `Feeder.takes_single`).
    """

    rows: Sequence[Sequence[int]]
    past: Sequence[int]
    starts: Sequence[int]
    fetch: tuple[str, ...]
    width: int = 0
    trees: Sequence[Draft] | None = None
    mixes: Sequence[Mixture] = ()
    single: bool = False


class Ahead(NamedTuple):
    """Tokens that have been through the first `parts` parts of the step only: `rows[b]` behind
    `past[b]` rows. outputs: by name, those parts' fetched outputs [B,N,...] of them."""

    parts: int
    past: list[int]
    rows: list[list[int]]
    outputs: dict[str, torch.Tensor]


class Feeder:
    """Runs the step function of an executable on a batch of ragged chunks.

    function: the step function, or one that does more. spare: rows that it makes for itself behind
    those of what it is fed. parts: the functions that are called instead of it, one after the
    other, if it was cut. seconds: time spent in the executable so far. context: positions that the
    model knows. ahead: what drafts have made of the step's first parts.
    """

    def __init__(
        self,
        executable: Executable,
        batch: int,
        function: str,
        spare: int = 0,
        parts: tuple[str, ...] = (),
    ) -> None:
        program = executable.program
        step = program.function(function)
        if not step.has_input("past"):
            raise UnsupportedError(
                f"{program.name} (stage {program.stage}) has no KV cache: run the pass "
                f"insert_kv_cache before generating"
            )
        self.executable, self.batch = executable, batch
        self.function, self.spare, self.parts = function, spare, parts or (function,)
        self.context = program.info.context
        # Prompt tokens have ids above the vocabulary's.
        self.ids = program.ids
        if step.has_input(Pictures.state):  # so have rows of pictures
            self.ids += program.plan.source.rows
        if EMBEDS in program.states_of(self.parts[0]):  # and those that a call gives
            self.ids += program.info.context
        self.names = frozenset(n for n in INPUTS if n not in OPTIONAL and step.has_input(n))
        self.selects, self.mixed = "select" in self.names, mixed_into(step)
        # Widths that are compiled one by one are not, for each number of tokens in them.
        self.packs = PACKED in self.names and executable.widths(function) == ANY
        self.widths = executable.widths(function)
        self.states, self.logged, self.latest = self._by_window(program)
        # They outlive a generation, because making them takes as long as a few steps.
        kept: dict[tuple[tuple[str, ...], int, int, int], StepInputs] = executable.scratch(Feeder)
        self._buffers = kept
        self.seconds = 0.0
        self.rows = 0
        self.folded = [0] * batch
        self.ahead: Ahead | None = None

    def begin(self, limit: int, draft: int, start: Callable[[int], None] | None = None) -> None:
        """Start sequences of at most `limit` tokens, fed up to `draft` + 1 at once.

        start: begins with room for so many rows; None: with nothing in them.
        """
        widest = self.width(draft + 1, 0)
        self.ahead = None
        self.rows = min(limit + widest + self.spare, self.executable.limit)
        if start is None:
            self.executable.begin(self.batch, self.rows)
        else:
            start(self.rows)
        for symbol, held in self.latest:
            # No step goes beyond a block, but columns that were not asked for may: what is drafted
            # and not looked at, one more of a step that is fed alone, and what fills up a prompt's.
            filled = self.widths.each if self.widths.more else (self.chunk(held.block, held.block),)
            self.executable.reserve(held.most + max((widest, *filled)) + 1, symbol)
        self.log(draft)

    def log(self, rows: int) -> None:
        """Let recurrences log so many rows that may be taken back."""
        if self.logged and rows > 0:
            self.executable.reserve(rows, LOG)

    def fold(self, past: Sequence[int], certain: Sequence[int]) -> None:
        """Note what recurrences cover after a step. Errors: `InputError` if one must go back."""
        if not self.logged:
            return
        for b, (rows, before) in enumerate(zip(past, self.folded, strict=True)):
            if 0 < rows < before:
                raise InputError(
                    f"sequence {b}: its recurrences cover {before} rows and cannot go back to "
                    f"{rows}"
                )
        self.folded = [rows + count for rows, count in zip(past, certain, strict=True)]

    def chunk(self, need: int, most: int | None = None) -> int:
        """Width of a prefill step when the longest sequence has `need` tokens left: that of which
        as many as it takes cost least, of two the wider. most: tokens that it may feed."""
        size = need if most is None else min(need, most)
        if self.widths.more:
            return min(self.widths.holding(size), CHUNK)
        each = self.widths.each
        costs = {width: -(-need // min(width, size)) * (width + READING) for width in each}
        return min(reversed(each), key=costs.__getitem__)

    def width(self, need: int, past: int) -> int:
        """Least width that holds `need` columns after `past` rows, else the largest there is."""
        found = self.widths.holding(need)
        return found if found in self.widths.each else min(found, self.executable.limit - past)

    def run(self, step: StepFeed) -> Outputs:
        """Run a step, from where drafts have led its tokens."""
        ahead = None if step.trees is not None else self._caught_up(step)
        self.ahead = None
        if ahead is None:
            return self.run_parts(self.parts, step, step.fetch)
        wanted = self._returned(ahead, step.fetch)
        rest = tuple(name for name in step.fetch if name not in wanted)
        outputs = self.run_parts(self.parts[ahead.parts :], step, rest)
        width = step.width or self._least(step)
        led = {name: widened(ahead.outputs[name], width) for name in wanted}
        return Outputs({**outputs, **led}) if led else outputs

    def lead(self, count: int, step: StepFeed) -> Outputs:
        """As `run`, through the first `count` parts alone. A later step on these tokens goes on
        from there; a later `lead` feeds, and returns outputs of, tokens behind them only."""
        if self.ahead is not None and self.ahead.parts != count:
            self.ahead = None
        rows, past, fetch = step.rows, step.past, step.fetch
        known = self._known(step)
        rest = StepFeed(
            [row[n:] for row, n in zip(rows, known, strict=True)],
            [place + n for place, n in zip(past, known, strict=True)],
            [start + n for start, n in zip(step.starts, known, strict=True)],
            fetch,
        )
        before = {} if self.ahead is None else self.ahead.outputs
        outputs = self.run_parts(self.parts[:count], rest, fetch)
        sizes = list(map(len, rows))
        kept = {name: joined(before.get(name), outputs[name], known, sizes) for name in fetch}
        self.ahead = Ahead(count, list(past), [list(row) for row in rows], kept)
        return outputs

    def _known(self, step: StepFeed) -> list[int]:
        """Tokens at the front of each row that were led already."""
        if self.ahead is None:
            return [0] * len(step.rows)
        return [
            _alike(row, led) if place == was else 0
            for row, place, led, was in zip(
                step.rows, step.past, self.ahead.rows, self.ahead.past, strict=True
            )
        ]

    def _caught_up(self, step: StepFeed) -> Ahead | None:
        """What the rows have been through once the last are led, too; None: feed them whole."""
        ahead = self.ahead
        if ahead is None or not any(known := self._known(step)):
            return None
        wanted = self._returned(ahead, step.fetch)
        if not all(name in ahead.outputs for name in wanted):
            return None  # it is not at hand any more
        if known != list(map(len, step.rows)):
            self.lead(ahead.parts, step._replace(fetch=wanted))
        return self.ahead

    def _returned(self, ahead: Ahead, fetch: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the outputs that the parts return which tokens were led through."""
        functions = list(map(self.executable.program.function, self.parts[: ahead.parts]))
        return tuple(name for name in fetch if any(name in fn.outputs for fn in functions))

    def run_parts(self, parts: Sequence[str], step: StepFeed, fetch: tuple[str, ...]) -> Outputs:
        """These outputs of some of the step's parts, or of functions in their place."""
        if step.single:
            return self._run_single(tuple(parts), step, fetch)
        rows, past, width = step.rows, step.past, step.width or self._least(step)
        self.make_room(max(past) + width)
        self.log(max(map(len, rows)) - 1)
        self.fold(past, [min(len(row), 1) for row in rows])
        buffers = self.buffers(width, tuple(parts), rows)
        buffers.fill(rows, past)
        if step.mixes:
            buffers.mix(step.mixes)
        trees, starts = step.trees, step.starts
        calls = buffers.chains(starts) if trees is None else buffers.trees(starts, trees)
        return self._timed(calls.fetching(self.executable, fetch))

    def _run_single(
        self, parts: tuple[str, ...], step: StepFeed, fetch: tuple[str, ...]
    ) -> Outputs:
        """The same of one token of each sequence, touching as little memory as possible."""
        memory = self.buffers(1, parts, step.rows)
        tokens, positions, past = memory.tokens, memory.positions, memory.past
        for index, row in enumerate(step.rows):
            tokens[index] = row[0] if row else 0
            positions[index] = step.starts[index]
            past[index] = step.past[index]
        return self._timed(memory.chain.fetching(self.executable, fetch))

    def _least(self, step: StepFeed) -> int:
        """The width of a step that says none."""
        return self.width(max(1, *map(len, step.rows)), max(step.past))

    def _timed(self, call: Callable[[], Outputs]) -> Outputs:
        start = perf_counter()
        outputs = call()
        self.seconds += perf_counter() - start
        return outputs

    @property
    def takes_single(self) -> bool:
        """Whether there are steps of one token, and nothing is kept of them but their rows."""
        return self.width(1, 0) == 1 and not self.logged

    def run_picking(
        self,
        step: StepFeed,
        column: Sequence[int],
        places: Sequence[Sequence[int]] = (),
        told: Callable[[dict[str, torch.Tensor]], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run a step of committed tokens. places: their positions, if not consecutive. Outputs of
        chosen tokens (dim S) have the one column `column[b]`, those of fed tokens (dim T) all.
        told: called with the outputs of all tokens before."""
        rows, past, width = step.rows, step.past, step.width
        self.make_room(max(past) + width)
        self.fold(past, list(map(len, rows)))
        # Not kept, nor held: prompts come in all lengths, and few of them again.
        buffers = self.buffers(width, rows=rows, again=False)
        buffers.fill(rows, past, for_good=True)
        inputs = buffers.picked(step.starts, column, places)
        if told is not None:
            inputs = buffers.chain.inputs
        outputs = self.call(inputs, step.fetch)
        if told is not None:
            told(outputs)
        elif self.selects:
            return outputs
        sequences, columns = torch.arange(self.batch)[:, None], torch.tensor(column)[:, None]
        return {
            name: value[sequences, columns] if name in CHOSEN else value
            for name, value in outputs.items()
        }

    def call(
        self, inputs: Mapping[str, torch.Tensor], fetch: tuple[str, ...]
    ) -> dict[str, torch.Tensor]:
        """Run the step on these inputs, as deep as it goes."""
        start = perf_counter()
        outputs = run_in_turn(self.executable, self.parts, inputs, fetch)
        self.seconds += perf_counter() - start
        return outputs

    def buffers(
        self,
        width: int,
        parts: tuple[str, ...] = (),
        rows: Sequence[Sequence[int]] = (),
        again: bool = True,
    ) -> StepInputs:
        """What steps of a width are fed from; parts: of the step, all unless said. rows: what will
        be fed; (): as many tokens as there are columns. again: whether such steps come again."""
        count = self.batch * width
        if self.packs and rows:
            count = max(1, sum(map(len, rows)))
        key = (parts or self.parts, self.batch, width, count)
        buffers = self._buffers.get(key)
        if buffers is None:
            made = StepInputs(*key[:3], self.names, self.ids, self.context, count, self.mixed)
            if not again:
                return made
            if len(self._buffers) >= SHAPES:
                self._buffers.clear()
            buffers = self._buffers[key] = made
        buffers.unmix()
        return buffers

    def keep(self, past: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Commit accepted paths of the last step: their rows move to the front of its rows."""
        longest = max(map(len, paths))
        # Columns: the root is 0, node i is i + 1. Rows after a path's own stay where they are.
        source = [
            [0, *(node + 1 for node in path), *range(len(path) + 1, longest + 1)] for path in paths
        ]
        if all(row == list(range(longest + 1)) for row in source):
            return
        start, first, moved = perf_counter(), torch.tensor(list(past)), torch.tensor(source)
        self.executable.commit(self.states, first, moved)
        if self.logged:  # a step's first token is certain: the log begins behind it
            self.executable.commit(self.logged, torch.zeros_like(first), moved[:, 1:] - 1)
        for (_, held), states in self.latest.items():
            self.executable.commit(states, torch.tensor([held.past(n) for n in past]), moved)
        self.seconds += perf_counter() - start

    def _by_window(
        self, program: Program
    ) -> tuple[tuple[str, ...], tuple[str, ...], dict[tuple[str, Latest], tuple[str, ...]]]:
        """The states with a row a token, those of the last step, and those with a budget."""
        read = [program.states_of(part) for part in self.parts]
        names = dict.fromkeys(name for some in read for name in some)
        kept, latest = program.plan.cache.held, program.plan.cache.latest
        symbols = {name: program.states[name].capacity or "" for name in names}
        grown = [name for name in names if program.states[name].grows]
        whole = tuple(name for name in grown if symbols[name] not in kept)
        logged = tuple(name for name in names if symbols[name] == LOG)
        return (
            whole,
            logged,
            {
                (symbol, held): tuple(name for name in names if symbols[name] == symbol)
                for symbol, held in latest.items()
            },
        )

    def make_room(self, rows: int) -> None:
        """Let the caches hold so many rows of each sequence, and the spare ones."""
        capacity = self.executable.capacity
        if self.spare:
            rows = min(rows + self.spare, self.executable.limit)
        if rows <= capacity:
            return
        # Doubling keeps the copying of grown caches linear in the length of the text.
        start = perf_counter()
        self.executable.reserve(max(rows, min(2 * capacity, self.rows)))
        self.seconds += perf_counter() - start


def _alike(row: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the front that two rows have in common."""
    return sum(1 for _ in takewhile(bool, map(eq, row, other)))
