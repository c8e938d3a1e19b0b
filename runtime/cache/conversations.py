"""Rows of the texts of earlier calls, for prompts that go on from them.

The last call's rows stay in the buffers. Before other sequences overwrite them they are copied, up
to `most` bytes, least recently used first out. A prompt that begins as one of these texts feeds the
rest only. While a call runs nothing in the buffers counts as held. Programs with recurrences hold
nothing: no text can go on from inside another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ...ir import SOURCE, Program
from ...ir.execution.executable import Executable
from ..asking.text import Text
from ..memo import Memo, Resumes
from .base import CachePolicy

LEAST = 16
"""Tokens that a prompt must share with a text: fewer are fed as fast as they are looked for."""

MOST = 256 * 2**20
"""Bytes that copies take at most, unless `Conversations.most` says otherwise."""


@dataclass(eq=False)
class Conversation:
    """A text of an earlier call.

    tokens: those that were fed. rows, position: of the `Text` after them. plan: what decided what
    its rows hold. draft: whose `memo` is. states: copies of its rows; None: they lie in the
    buffers. pinned: it stays until it is forgotten.
    """

    tokens: list[int]
    rows: int
    position: int
    plan: tuple[Any, ...]
    draft: Any
    memo: Memo
    states: Mapping[str, torch.Tensor] | None = None
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of its copies."""
        held = [*(self.states or {}).values(), *self.memo.values()]
        return sum(tensor.nbytes for tensor in held)

    def extend(self, tokens: Sequence[int]) -> None:
        """Rows of so many more tokens lie behind its own. No drafter has seen them."""
        self.tokens = [*self.tokens, *tokens]
        self.rows += len(tokens)
        self.position += len(tokens)
        self.draft, self.memo = None, {}

    def rows_at(self, count: int) -> int:
        """Rows of its first `count` tokens."""
        return self.rows - len(self.tokens) + count


@dataclass(frozen=True, eq=False)
class Start:
    """A new text begins with the first `count` tokens of a conversation."""

    conversation: Conversation
    count: int


class Going(Protocol):
    """The generation that goes on from conversations; see `Decoding`."""

    program: Program
    texts: Sequence[Text]
    cache: CachePolicy

    @property
    def drafter(self) -> Resumes:
        """Its drafter."""

    @property
    def depth(self) -> Resumes:
        """Its depth policy."""

    @property
    def reads_as_it_steps(self) -> bool:
        """Whether a token's rows are the same in a prompt and in what was generated."""


@dataclass(eq=False)
class Conversations:
    """Those of one executable. See the module docstring.

    most: bytes that copies take at most. stored: conversations that were copied away, the one that
    was used last at the end. lying: by sequence, those whose rows lie in the buffers, as long as
    the executable's `begun` is what it was.
    """

    most: int = MOST
    stored: list[Conversation] = field(default_factory=list)
    lying: list[Conversation | None] = field(default_factory=list)
    begun: int = -1

    @classmethod
    def of(cls, executable: Executable) -> Conversations:
        """The executable's own."""
        kept: dict[str, Conversations] = executable.scratch("conversations")
        found = kept.get("all")
        if found is None:
            # Copies serve every part of the buffers; what lies in a part is its own.
            stored = executable.scratch("conversations", shared=True).setdefault("stored", [])
            found = kept["all"] = cls(stored=stored)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(conversation.nbytes for conversation in self.stored)

    def forget(self) -> None:
        """Nothing is held any more."""
        self.stored.clear()
        self.lying = []

    def find(self, executable: Executable, going: Going) -> list[Start | None]:
        """Which conversation each text goes on from."""
        if self.begun != executable.begun:
            self.lying = []
        return [self._find(going, slot, text) for slot, text in enumerate(going.texts)]

    def _find(self, going: Going, slot: int, text: Text) -> Start | None:
        # The sequence's own place first: where it goes on, nothing is copied.
        own, best, most = self.lying[slot : slot + 1], None, LEAST - 1
        for conversation in (*own, *self.lying, *reversed(self.stored)):
            if conversation is None or conversation.plan != deciding(going.program):
                continue
            # Something must be fed: only a step says what follows.
            same = common(conversation.tokens, text.tokens, len(text.tokens) - 1)
            count = _reach(going, conversation, same) if same > most else 0
            if count > most:
                best, most = conversation, count
        return None if best is None else Start(best, most)

    def known(self, executable: Executable, program: Program) -> list[Conversation]:
        """Those that texts of a program may go on from, the one that was used last at the end."""
        lying = self.lying if self.begun == executable.begun else []
        held = [*self.stored, *(one for one in lying if one is not None)]
        return [one for one in held if one.plan == deciding(program)]

    def rows(
        self, executable: Executable, conversation: Conversation, start: int, count: int
    ) -> dict[str, torch.Tensor]:
        """Rows of a conversation that holds one for each token, of all states."""
        program = executable.program
        if conversation.states is None:
            slot = next(n for n, one in enumerate(self.lying) if one is conversation)
            return executable.read_rows(kept_states(program), slot, start, start + count)
        axes = {name: _row_axis(program, name) for name in conversation.states}
        return {n: t.narrow(axes[n], start, count) for n, t in conversation.states.items()}

    def place(
        self,
        executable: Executable,
        starts: Sequence[Start | None],
        cache: CachePolicy,
        rows: int,
    ) -> None:
        """Begin with the rows of the conversations that texts go on from; `rows` is room to make.

        cache: says what they share. Until `leave`, nothing counts as lying in the buffers.
        """
        lying, self.lying = self.lying, []
        stay = not cache.shared and _stays(lying, starts)
        for slot, conversation in enumerate(lying):
            if conversation is None:
                continue
            start = starts[slot] if stay else None
            goes_on = start is not None and start.conversation is conversation
            if start is None or not goes_on or len(conversation.tokens) - start.count > LEAST:
                self.put_away(executable, slot, conversation)
        if stay:
            executable.resume(rows)
        else:
            executable.begin(len(starts), rows)
        for slot, start in enumerate(starts):
            if start is not None and not (stay and start.conversation is lying[slot]):
                self._write(executable, slot, start, cache)

    def _write(self, executable: Executable, slot: int, start: Start, cache: CachePolicy) -> None:
        conversation = start.conversation
        assert conversation.states is not None  # put away, if it lay elsewhere
        if conversation in self.stored:
            self.stored.remove(conversation)
            self.stored.append(conversation)
        rows, program = conversation.rows_at(start.count), executable.program
        own = rows - cache.shared
        executable.reserve(max(own, 1))
        make_room(executable, start.count)
        held = {
            n: _first_rows(program, n, t, rows, start.count) for n, t in conversation.states.items()
        }
        if cache.shared:
            axes = {name: _row_axis(program, name) for name in held}
            if slot == 0:
                cache.place({n: t.narrow(axes[n], 0, cache.shared) for n, t in held.items()})
            held = {n: t.narrow(axes[n], cache.shared, own) for n, t in held.items()}
        executable.write_rows(slot, 0, held)

    def put_away(self, executable: Executable, slot: int, conversation: Conversation) -> None:
        """Copy a conversation's rows out of the buffers, and keep them as long as there is room."""
        if len(conversation.tokens) < LEAST:
            return
        conversation.states = read_text(
            executable, slot, conversation.rows, len(conversation.tokens)
        )
        self.store(conversation)

    def store(self, conversation: Conversation) -> None:
        """Keep copies; those that they go on from are not needed beside them."""
        self.stored[:] = [known for known in self.stored if not _within(known, conversation)]
        self.stored.append(conversation)
        self.limit(self.most)

    def limit(self, most: int) -> None:
        """Copies take no more than so many bytes from now on, pinned ones besides."""
        self.most = most
        over = sum(known.nbytes for known in self.stored if not known.pinned) - most
        for known in [known for known in self.stored if not known.pinned]:
            if over > 0:
                self.stored.remove(known)
                over -= known.nbytes

    def retire(self, executable: Executable, slot: int, going: Going) -> None:
        """A text is finished and others go on: steps write over its first rows from now on."""
        if not _stands_alone(going):
            return
        self.put_away(executable, slot, _left(going, slot))

    def leave(self, executable: Executable, going: Going, retired: set[int]) -> None:
        """The generation is over; its texts' rows lie in the buffers, except `retired` ones."""
        slots = range(len(going.texts) if _stands_alone(going) else 0)
        self.lying = [None if slot in retired else _left(going, slot) for slot in slots]
        self.begun = executable.begun

    def clear_buffers(self, executable: Executable) -> None:
        """Copy what lies in the buffers, which are about to be used otherwise."""
        if self.begun == executable.begun:
            for slot, conversation in enumerate(self.lying):
                if conversation is not None:
                    self.put_away(executable, slot, conversation)
        self.lying = []


def deciding(program: Program) -> tuple[Any, ...]:
    """What decides what a text's rows hold; executables of one program differ in nothing else."""
    return program.plan.cache, program.plan.depth


def kept_states(program: Program) -> list[str]:
    """States that hold rows of a text, not of its source or of a shared beginning."""
    return [n for n, s in program.states.items() if s.capacity != SOURCE and not s.together]


def rows_of(program: Program, state: str, rows: int, tokens: int) -> int:
    """Rows that a state holds of a text of so many tokens for which others hold `rows`."""
    held = program.plan.cache.held.get(program.states[state].capacity or "")
    return rows if held is None else held.rows_of(rows, tokens)


def make_room(executable: Executable, tokens: int) -> None:
    """Let states that hold every token of a text, whatever others keep, hold so many."""
    for symbol in executable.program.plan.cache.whole:
        executable.reserve(max(tokens, 1), symbol)


def read_text(executable: Executable, slot: int, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """All that the states hold of a sequence of so many tokens, for which most hold `rows`."""
    program = executable.program
    make_room(executable, tokens)
    counts = {name: rows_of(program, name, rows, tokens) for name in kept_states(program)}
    found: dict[str, torch.Tensor] = {}
    for count in set(counts.values()):
        names = [name for name, n in counts.items() if n == count]
        found |= executable.read_rows(names, slot, 0, count)
    return found


def _first_rows(
    program: Program, name: str, held: torch.Tensor, rows: int, tokens: int
) -> torch.Tensor:
    """The first rows of what `read_text` gave of a state."""
    return held.narrow(_row_axis(program, name), 0, rows_of(program, name, rows, tokens))


def _row_axis(program: Program, name: str) -> int:
    """The axis of a state's rows in what is held of one sequence."""
    state = program.states[name]
    return [str(dim) for dim in state.type.dims if str(dim) != "B"].index(str(state.capacity))


def memo_of(going: Going, conversation: Conversation) -> Memo:
    """What drafter and depth policy kept of it; nothing if the drafter was another one."""
    return conversation.memo if conversation.draft == going.program.plan.draft else {}


def _reach(going: Going, conversation: Conversation, same: int) -> int:
    fed, memo = len(conversation.tokens), memo_of(going, conversation)
    count = min(going.drafter.reach(memo, same), going.depth.reach(memo, same))
    return going.cache.back_to(fed, count) if count > 0 else 0


def _stands_alone(going: Going) -> bool:
    """Whether what lies in the buffers of a text is all of it: not where a recurrence holds it, and
    not where others share its beginning, which is kept as a text of its own."""
    return not going.program.recurrent and not going.cache.shared


def _left(going: Going, slot: int) -> Conversation:
    text, plan = going.texts[slot], going.program.plan
    memo = {**going.drafter.keep(slot, text.fed), **going.depth.keep(slot, text.fed)}
    fed = text.fed
    if not going.reads_as_it_steps:  # what it made itself, it would have read otherwise
        fed = going.cache.back_to(fed, min(fed, text.prompt))
    tokens, over = text.tokens[:fed], text.fed - fed
    decided = deciding(going.program)
    return Conversation(tokens, text.rows - over, text.position - over, decided, plan.draft, memo)


def _stays(lying: Sequence[Conversation | None], starts: Sequence[Start | None]) -> bool:
    """Whether every text that goes on from one in the buffers has its place there."""
    if len(lying) != len(starts):
        return False
    held = [one for one in lying if one is not None]
    own = [s is not None and s.conversation is one for s, one in zip(starts, lying, strict=True)]
    moved = any(
        s is not None and not here and any(s.conversation is one for one in held)
        for s, here in zip(starts, own, strict=True)
    )
    return any(own) and not moved


def _within(known: Conversation, longer: Conversation) -> bool:
    count = len(known.tokens)
    same = known.plan == longer.plan and known.draft == longer.draft and not known.pinned
    return same and known.tokens == longer.tokens[:count]


def common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many tokens both begin with, up to `most`."""
    low, high = 0, min(len(one), len(other), most)
    while low < high:  # whole pieces are compared at once
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
