"""A place in the batch, and the request that is decoded in it.

A slot is one sequence of the buffers, as an executable of its own (`Executable.sequences`). What a
request has to itself runs there as it does alone: its options, drafter, verifier and cache policy,
and its prompt. Only decode steps are made together (`engine`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ...ir.execution.executable import Executable
from ..asking.text import Text
from ..cache.conversations import LEAST, Conversations, common, deciding
from ..feeding.draft import Draft, VerifiedStep
from ..feeding.outputs import Outputs
from ..reading import Reading
from ..rounds.base import Decoding
from ..rounds.general import GeneralRound
from ..stats import Stats
from .lengths import BoundPolicy, SharedLengths
from .ticket import Reason, Ticket

FREE = Text([0], 1, 1, done=True)
"""The text of a slot that decodes nothing."""


class Slot:
    """See the module docstring.

    executable: over this sequence alone. keeps: whether rows of a text that ended stay, for others
    that begin so. ticket: what runs here; None: the slot is free. used: when it was last taken.
    drafting: seconds that its last draft took, once its drafter knew the text. taken: what came of
    its part of the last step.
    """

    def __init__(self, executable: Executable, index: int, *, keeps: bool) -> None:
        self.index, self.executable = index, executable.sequences(index, 1)
        self.kept, self.keeps = Conversations.of(self.executable), keeps
        self.ticket: Ticket | None = None
        self.used = 0
        self._decoding: Decoding | None = None
        self._round: GeneralRound | None = None
        self._reading: Reading | None = None
        self._pieces: Generator[None, int | None, None] | None = None
        self.taken: VerifiedStep | None = None
        self.drafting = 0.0

    @property
    def decoding(self) -> Decoding:
        """Of the request that runs here."""
        assert self._decoding is not None
        return self._decoding

    @property
    def stats(self) -> Stats:
        """Of what runs here."""
        return self.decoding.stats if self._reading is None else self._reading.stats

    @property
    def round(self) -> GeneralRound:
        """Its steps."""
        assert self._round is not None
        return self._round

    @property
    def reads(self) -> bool:
        """Whether a prompt is being fed."""
        return self._pieces is not None

    @property
    def decodes(self) -> bool:
        """Whether it takes part in steps."""
        return self.ticket is not None and self._pieces is None

    @property
    def drafts(self) -> bool:
        """Whether it may draft in the next step, after `SharedLengths.decide`."""
        length = self.decoding.length if self.decodes else None
        return length is not None and not (isinstance(length, BoundPolicy) and not length.bound)

    @property
    def rows(self) -> int:
        """Rows that a step must not write over."""
        if self.ticket is not None:
            return self.ticket.text.rows
        return max((held.rows for held in self.kept.lying if held is not None), default=0)

    def shares(self, tokens: Sequence[int]) -> int:
        """Tokens of a prompt whose rows lie in this free slot; 0 where they are too few."""
        decided = deciding(self.executable.program)
        held = [one for one in self.kept.lying if one is not None and one.plan == decided]
        same = max((common(one.tokens, tokens, len(tokens) - 1) for one in held), default=0)
        return same if same >= LEAST else 0

    def begin(self, ticket: Ticket, lengths: SharedLengths) -> None:
        """Take a request; its prompt is fed by `read`. Errors: those of `Decoding`."""
        if ticket.pooling:
            reading = Reading(self.executable, [ticket.text], ticket.pooling)
            self.ticket, self._reading, self._pieces = ticket, reading, reading.starting()
        else:
            told = ticket.hear if ticket.scored else None
            decoding = Decoding(self.executable, ticket.request, told)
            decoding.length = lengths.of(decoding.length)
            self.ticket, self._decoding, self._round = ticket, decoding, GeneralRound(decoding)
            self._pieces = decoding.starting()
        next(self._pieces)

    def read(self, most: int | None) -> int:
        """Feed a piece of the prompt of at most so many tokens; how many it took. The last piece
        brings the first new token."""
        assert self._pieces is not None and self.ticket is not None
        before = self.ticket.text.rows
        try:
            self._pieces.send(most)
        except StopIteration:
            self._pieces = None
            if self._reading is not None:
                self.ticket.states = self._reading.states[0]
        return max(self.ticket.text.rows - before, 1)

    def propose(self) -> Sequence[Draft]:
        """The draft of the next step."""
        self.taken, self.round.late = None, 0.0
        self.decoding.cache.settle(self.decoding.texts)
        before = self.decoding.clock()
        drafts = self.round.propose()
        self.drafting = self.decoding.clock() - before - self.round.late
        return drafts

    def take(self, draft: Draft, fed: Sequence[int], outputs: Outputs, seconds: float) -> None:
        """Verify this sequence's part of a step."""
        decoding, made = self.decoding, self.decoding.texts[0].generated
        self.taken = step = self.round.take([draft], [fed], outputs)
        if self.ticket is not None:
            self.ticket.foreseen += range(made, made + len(step.paths[0]))
        decoding.length.observe(step, self.drafting, seconds)
        decoding.stats.count(1, 1)

    def reason(self) -> Reason:
        """Why the text is done."""
        assert self.ticket is not None
        text, stopping = self.ticket.text, self.ticket.request.stopping
        ended = text.tokens[-1] in stopping.eos or len(text.tokens) < text.limit
        return Reason.STOP if ended else Reason.LENGTH

    def release(self) -> None:
        """Give up the request. Rows of what was decoded stay for texts that begin so."""
        if self._decoding is not None and self._pieces is None and self.keeps:
            self._decoding.texts[0].done = True
            self._decoding.finish()
        else:
            self.kept.lying = []
        self.ticket = self._decoding = self._round = self._pieces = self._reading = None
