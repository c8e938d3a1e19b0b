"""A draft model that checks several guesses of its own next tokens in one step.

Source: Spector and Re, "Accelerating LLM Inference with Staged Speculative Decoding" (2023).

Each step of the draft model is also fed guesses of a cheap inner drafter. While the draft follows
the guesses its predictions are ready; where it leaves them the model runs again. The draft is the
same as without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ....ir.plan import StagedDraft, StagedSharedDraft
from ...cache.conversations import common
from ...memo import Memo
from ..drafters.grown import drafter_for
from ..setting import Setting
from ..translated import Translated, Vocabularies, same_rows
from .base import PROPOSERS
from .hidden import level_of
from .kept import KeepingProposer, KeptSequence, places_of


class _Sequence(KeptSequence):
    """One sequence. said: what the target calls the path's tokens. guesses: what the model was fed
    after the path, and not asked yet; `ready` has its predictions after each of them, too."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self.said: list[int] = []
        self.guesses: list[int] = []

    @property
    def end(self) -> int:
        return self.rows[0] + len(self.guesses)

    def begin(self) -> None:
        super().begin()
        self.said, self.guesses = [], []


@PROPOSERS.register(StagedDraft)
class StagedProposer(KeepingProposer):
    """used: guesses that saved a step."""

    record: StagedDraft

    def __init__(self, record: StagedDraft, setting: Setting) -> None:
        super().__init__(record, setting, (record.function,))
        self.inner = self.follower = drafter_for(record.drafter, setting)
        self.wants = self.inner.wants
        self.used = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        nothing = [0] * len(prompts)
        self.inner.ahead([()] * len(prompts), nothing)  # which tells whether it can

    def sequence(self, prompt: Sequence[int]) -> _Sequence:
        return _Sequence(prompt)

    def bring_up(self, usual: int) -> bool:
        return any([super().bring_up(usual), self.inner.bring_up(usual)])

    def went_on(self, sequence: _Sequence, own: list[int], token: int) -> None:
        sequence.said.append(token)
        if sequence.guesses[:1] == own:
            sequence.rows[0] += 1
            self.used += 1
            del sequence.guesses[0], sequence.ready[0]
        else:
            sequence.guesses, sequence.ready = [], []

    def ask(self, asking: Sequence[bool]) -> None:
        """Run the model, with new guesses behind the path."""
        pairs = list(zip(self.sequences, asking, strict=True))
        rooms = [self._room(s) if asks else 0 for s, asks in pairs]
        guesses = [self.own(g) for g in self.inner.ahead([s.said for s in self.sequences], rooms)]
        rows, select = [], []
        most = max(map(len, guesses))
        for (sequence, asks), guess in zip(pairs, guesses, strict=True):
            new = sequence.known[sequence.rows[0] :] if asks else []
            rows.append([*new, *guess])
            last = max(len(rows[-1]) - 1, 0)
            select.append([min(max(len(new) - 1, 0) + i, last) for i in range(1 + most)])
        outputs = self.run(rows, np.array(select, dtype=np.int64))
        whole = level_of(outputs, self.executable.program.info.vocab_size)
        for index, ((sequence, asks), guess) in enumerate(zip(pairs, guesses, strict=True)):
            if asks and sequence.alive:
                sequence.rows[0] = sequence.size
                sequence.guesses = list(guess)
                sequence.ready = places_of(whole, index)[: 1 + len(guess)]

    def _room(self, sequence: _Sequence) -> int:
        """Guesses that might be asked for."""
        have = sequence.size
        levels = self.levels - 1 - len(sequence.path)
        return max(0, min(levels, self.limit - have, self.widest - have + sequence.rows[0]))


class _Translated(_Sequence):
    """One sequence in the model's own tokens. written: the text."""

    def __init__(self, written: Translated) -> None:
        super().__init__(written.ids)
        self.written = written

    def begin(self) -> None:
        super().begin()
        self.open = self.open and self.written.ready and bool(self.tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        old, ids = len(self.tokens), self.written.ids
        same = self.written.extend(tokens)
        (rows,) = self.rows
        if rows >= old == same:  # the rows of the draft follow
            same = old + common(self.path, ids[old:], rows - old)
        self.rows = [max(min(rows, same, len(ids) - 1), 0)]
        self.tokens = ids
        self.begin()


@PROPOSERS.register(StagedSharedDraft)
class StagedSharedProposer(StagedProposer):
    """A model with tokens of its own, which predicts and is given those that the target has."""

    record: StagedSharedDraft

    def __init__(self, record: StagedSharedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.words = Vocabularies.of(self.executable, record.function, record.shared)

    def sequence(self, prompt: Sequence[int]) -> _Sequence:
        return _Translated(Translated(self.words, prompt))

    def own(self, tokens: list[int]) -> list[int]:
        return self.words.own(tokens)

    def keep(self, index: int, fed: int) -> Memo:
        sequence = self.sequences[index]
        own = torch.tensor(sequence.tokens[: sequence.rows[0]], dtype=torch.int64)
        return {**self.inner.keep(index, fed), "own": own}

    def resume(self, index: int, memo: Memo, count: int) -> None:
        sequence = self.sequences[index]
        sequence.rows = [same_rows(memo, sequence.tokens, count)]
        self.inner.resume(index, memo, count)
