"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ....ir import UnsupportedError
from ....ir.execution.executable import Executable
from ....ir.plan import DraftRecord, NoDraft
from ...feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ...feeding.outputs import integers
from ...memo import Lore, learnt
from ...registry import Registry
from ..follower import Follower
from ..setting import Setting


class Drafter(Follower, ABC):
    """Proposes tokens for every unfinished sequence of a batch before each step.

    Register a subclass with ``@DRAFTERS.register(ItsRecord)`` in its own file of this folder.
    lore: what holds all that it learns of texts from call to call (`lore_of`); None: it learns
    nothing that outlives a text, or nothing that a file could keep.
    """

    lore: ClassVar[type[Lore] | None] = None

    def __init__(self, record: Any, setting: Setting) -> None:
        self.record, self.executable, self.options = record, setting.executable, setting.options
        self.setting = setting

    @property
    def rests(self) -> tuple[str, ...]:
        """Outputs that it wants of steps without drafts, where a step of its own drafts."""
        return self.wants

    def prepare(self, rooms: Sequence[int]) -> bool:
        """Where a step of its own drafts, such steps are about to be made; whether it had to do
        something for them. rooms: levels of a draft by text; 0 for done ones."""
        return False

    def sources(self, count: int) -> Sequence[Sequence[int]]:
        """What each of `count` texts is written from; () where that is nothing of its own."""
        return [text.source for text in self.setting.texts] or [()] * count

    def readable(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What may be copied when texts begin: their sources, and the prompts behind them."""
        sources, known = self.sources(len(prompts)), self.known(prompts)
        return [[*source, *prompt] for source, prompt in zip(sources, known, strict=True)]

    def known(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The prompts without tokens of which only rows are known."""
        unknown = [text.unknown for text in self.setting.texts] or [0] * len(prompts)
        return [prompt[count:] for prompt, count in zip(prompts, unknown, strict=True)]

    @abstractmethod
    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """A draft for each sequence, of at most `rooms[b]` levels; 0: `NO_DRAFT`."""

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """For each sequence up to `counts[b]` tokens that may follow its text and `tokens[b]`.

        Those are not committed: another drafter made them, and it asks what it might make next.
        Nothing is learned from them. Errors: `UnsupportedError` for a drafter that cannot tell.
        """
        raise UnsupportedError(
            f"draft={self.record} cannot draft for another drafter: it knows only what follows "
            f"committed text; drafters that copy can, such as suffix"
        )

    def branches(self, tokens: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[Draft]:
        """As `ahead`, trees of at most `rooms[b]` levels. Here they are its chains."""
        chains = self.ahead(tokens, [max(room, 0) for room in rooms])
        return [Draft(chain) if chain else NO_DRAFT for chain in chains]


class ChainDrafter(Drafter):
    """A drafter that knows a sequence's next chain as soon as that sequence's text has grown.

    So it need not be asked for all sequences at once (see `chained`). levels: tokens of its chains
    at most; 0: it makes none of these now. wants: at most one output, i64[B,N], of which `learn`
    takes the sequence's row. ready: its chains take no time to make, whether they are used or not.
    in_step: the step that verifies a chain makes the next one.
    """

    levels: int = 0
    ready: bool = True
    in_step: ClassVar[bool] = False

    def evidence(self, index: int) -> int:
        """How much speaks for the sequence's next chain, in a few steps: chains for which as much
        does are accepted alike. Here all are."""
        return 0

    @abstractmethod
    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        """Sequence `index` has gained tokens `new`. row: its row of the wanted output, if any."""

    @abstractmethod
    def chain(self, index: int, room: int) -> list[int]:
        """At most `room` and `levels` tokens that may follow the sequence's text; [] for none."""

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        chains = [self.chain(index, room) for index, room in enumerate(rooms)]
        return [Draft(chain) if chain else NO_DRAFT for chain in chains]

    def observe(self, taken: VerifiedStep) -> None:
        wanted = integers(taken.outputs, self.wants[0]) if self.wants else taken.tokens
        for index, (tokens, row) in enumerate(zip(taken.tokens, wanted, strict=True)):
            if tokens:
                self.learn(index, tokens, row)


DRAFTERS: Registry[Drafter] = Registry(__package__)


def lore_of(executable: Executable, drafter: type[Drafter], record: DraftRecord) -> Any:
    """What a drafter has learned of texts so far, an instance of its `lore`."""
    assert drafter.lore is not None
    kept = learnt(executable, drafter)
    if record not in kept:
        kept[record] = drafter.lore(record)
    return kept[record]


@DRAFTERS.register(NoDraft)
class NoDrafter(Drafter):
    """Proposes nothing."""

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT] * len(rooms)
