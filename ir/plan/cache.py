"""Cache records: which rows of the committed text the states keep."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..support.errors import InputError
from .base import Record, Returned, record
from .bounds import Budgets, Context, Filled, Nodes, Place
from .contract import Contract
from .held import First, Groups, Held, Latest, Texts, Together

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from .decode import DecodePlan

_OWN = re.compile(r"C\.[0-9]+", re.ASCII)


@dataclass(frozen=True)
class CacheRecord(Record):
    """Base of cache records. settles: states are changed between steps."""

    slot: ClassVar[str] = "cache"
    noun: ClassVar[str] = "cache policy"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"cached"})
    settles: ClassVar[bool] = True

    @property
    def most(self) -> int | None:
        """Rows that states hold of a sequence at most; None: one for every token of its text."""
        return None

    @property
    def moves(self) -> bool:
        """Whether rows move, or are dropped, between steps."""
        return self.most is not None or bool(self.held)

    @property
    def latest(self) -> Mapping[str, Latest]:
        """By capacity: states that steps write and that have a budget of their own."""
        return {}

    @property
    def held(self) -> Mapping[str, Held]:
        """By capacity: states that have no row for every row of a text."""
        return self.latest

    @property
    def endless(self) -> bool:
        """Whether positions end before texts do: no text is too long for the model."""
        return False

    @property
    def aligned(self) -> bool:
        """Whether states that steps write hold a text's tokens from the first one on, so that
        caches of drafts, which do, may stand beside them."""
        return self.most is None

    @property
    def whole(self) -> frozenset[str]:
        """Capacities of states of drafts that hold every token of a text, whatever others keep."""
        return frozenset(symbol for symbol, held in self.held.items() if isinstance(held, Texts))

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns that pieces of prompts often have: a `block`, where rows change by blocks."""
        block: int | None = getattr(self, "block", None)
        return () if block is None else (block,)

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        """See `Record.calls`: its `function`, where it has one, which changes states."""
        function: str | None = getattr(self, "function", None)
        if function is not None:
            yield function, {}


@record
class KeepAll(CacheRecord):
    """The cache keeps every committed token's rows."""

    kind: ClassVar[str] = "all"
    settles: ClassVar[bool] = False


@record
class KeepShared(CacheRecord):
    """The cache keeps every token's rows, those that all texts of a batch begin with once.

    capacity: of states with those rows, which have no batch: of each state that steps write there
    is one, whose name ends in `part`. held_rows: the state whose first number says how many.
    """

    capacity: str = "C.1"
    held_rows: str = "shared.held"
    kind: ClassVar[str] = "shared"
    contract: ClassVar[Contract] = Contract.EXACT
    part: ClassVar[str] = "shared"
    aligned: ClassVar[bool] = False
    settles: ClassVar[bool] = False

    def check(self) -> None:
        if not _OWN.fullmatch(self.capacity):
            raise InputError(f"shared: capacity={self.capacity!r}, expected a name such as C.1")

    @property
    def held(self) -> Mapping[str, Held]:
        return {self.capacity: Together()}


@record
class KeepEdited(CacheRecord):
    """The cache keeps every committed token's rows, also those behind what was edited.

    Where a prompt is an earlier text edited, `function` turns the keys behind the edit to where
    they come to stand. least: tokens of a run that is found again.
    """

    function: Filled[str] = "shift"
    least: Nodes = 32
    kind: ClassVar[str] = "edited"


@record
class Evict(CacheRecord):
    """A sequence that has `budget` + `block` rows is left `budget` of them by `function`.

    So a sequence loses rows where its text reaches certain lengths, however it got there, and no
    step goes beyond such a place. function: moves the kept rows to the front; of a sequence that
    holds fewer, or for which past is 0, it changes nothing. turned: the keys are rotated for the
    rows where they end up, so that a row's position is its place and texts may be endless. window:
    the capacity of states that hold the queries of the last `block` rows ("": none). always: the
    function runs after every `block` rows, also before there are enough, from `since` rows on
    and, for an opening, after the first block: before that it changes nothing. capacities: of
    layers that are left fewer rows, and budgets: how many; always is then set. opening: that of
    states with the queries of the first `opening_rows` tokens ("": none). dropped: that of states
    of `dropped_rows` rows that hold what dropped ones add up to ("": none). drafts: that of states
    of drafts, which lose nothing ("": none).
    """

    function: Filled[str] = "evict"
    budget: Context = 1024
    block: Nodes = 64
    turned: Filled[bool] = False
    window: Filled[str] = ""
    always: Filled[bool] = False
    since: Filled[Place] = 0
    capacities: Filled[tuple[str, ...]] = ()
    budgets: Filled[Budgets] = ()
    opening: Filled[str] = ""
    opening_rows: Filled[Nodes] = 32
    dropped: Filled[str] = ""
    dropped_rows: Filled[Nodes] = 8
    drafts: Filled[str] = ""
    kind: ClassVar[str] = "evict"

    def check(self) -> None:
        if self.budget % self.block:
            raise InputError(
                f"evict: budget={self.budget} must be a multiple of block={self.block}, because "
                f"rows are dropped a block at a time"
            )
        if self.window and not _OWN.fullmatch(self.window):
            raise InputError(f"evict: window={self.window!r}, expected a capacity such as C.1")
        more = [name for name in (self.opening, self.dropped) if name]
        drafts = [self.drafts] * bool(self.drafts)
        own, named = [*self.capacities, self.window, *more, *drafts], [*self.capacities, *more]
        named += drafts
        if len(set(own)) < len(own) or not all(map(_OWN.fullmatch, named)):
            raise InputError(
                f"evict: capacities={self.capacities}, expected names such as C.2, each once"
            )
        least = all(0 < b < self.budget and b % self.block == 0 for b in self.budgets)
        if len(self.budgets) != len(self.capacities) or not least:
            raise InputError(
                f"evict: budgets={self.budgets} of capacities={self.capacities}; expected one "
                f"each, multiples of block={self.block} below budget={self.budget}"
            )
        if self.since > min((*self.budgets, self.budget)) + self.block:
            raise InputError(
                f"evict: since={self.since}, and layers drop rows from "
                f"{min((*self.budgets, self.budget)) + self.block} on"
            )
        if (self.budgets or more) and not self.always:
            raise InputError(
                "evict: with budgets of layers, an opening or a state of what is dropped, expected "
                "always=True"
            )

    @property
    def most(self) -> int:
        return self.budget + self.block

    @property
    def latest(self) -> Mapping[str, Latest]:
        queries = {self.window: Latest(0, self.block)} if self.window else {}
        less = zip(self.capacities, self.budgets, strict=True)
        return queries | {symbol: Latest(budget, self.block) for symbol, budget in less}

    @property
    def held(self) -> Mapping[str, Held]:
        first: dict[str, Held] = {}
        if self.opening:
            first[self.opening] = First(self.opening_rows)
        if self.dropped:
            first[self.dropped] = First(self.dropped_rows)
        if self.drafts:
            first[self.drafts] = Texts()
        return {**self.latest, **first}

    @property
    def endless(self) -> bool:
        return self.turned


@record
class StoreOld(CacheRecord):
    """Rows of a text are stored in few bits by `function`, but for the latest.

    Where a text ends a block and `residual` + `block` of its rows are floats, the oldest `block` of
    them are stored: no step goes beyond such a place. latest: the capacity of states with floats.
    groups: that of states with a row for every `group` rows of a text ("": none).
    """

    function: Filled[str] = "store"
    residual: Context = 128
    block: Nodes = 64
    latest_rows: Filled[str] = "C.1"
    groups: Filled[str] = ""
    group: Nodes = 32
    kind: ClassVar[str] = "store"

    def check(self) -> None:
        if self.residual % self.block or self.block % self.group:
            raise InputError(
                f"store: residual={self.residual}, block={self.block} and group={self.group}: "
                f"expected a residual of whole blocks, and blocks of whole groups"
            )
        own = [self.latest_rows, *[self.groups] * bool(self.groups)]
        if len(set(own)) < len(own) or not all(map(_OWN.fullmatch, own)):
            raise InputError(f"store: capacities {own}, expected names such as C.1, each once")

    @property
    def most_latest(self) -> int:
        """Rows that are floats when some of them are stored."""
        return self.residual + self.block

    @property
    def latest(self) -> Mapping[str, Latest]:
        return {self.latest_rows: Latest(self.residual, self.block)}

    @property
    def held(self) -> Mapping[str, Held]:
        return {**self.latest, **({self.groups: Groups(self.group)} if self.groups else {})}


@record
class MarkChunks(CacheRecord):
    """The cache keeps every committed token's rows, and a landmark for every `chunk` of them.

    Where a text ends a block, `function` makes those of the block: no step goes beyond such a
    place. groups: the capacity of states with landmarks.
    """

    function: Filled[str] = "mark"
    block: Nodes = 64
    chunk: Nodes = 8
    groups: Filled[str] = "C.2"
    kind: ClassVar[str] = "marked"

    def check(self) -> None:
        if self.block % self.chunk or not _OWN.fullmatch(self.groups):
            raise InputError(
                f"marked: block={self.block}, chunk={self.chunk} and groups={self.groups!r}: "
                f"expected blocks of whole chunks, and a capacity such as C.2"
            )

    @property
    def held(self) -> Mapping[str, Held]:
        return {self.groups: Groups(self.chunk)}
