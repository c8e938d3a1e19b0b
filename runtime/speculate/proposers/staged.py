"""A draft model that checks several guesses of its own next tokens in one step.

Source: Spector and Re, "Accelerating LLM Inference with Staged Speculative Decoding" (2023).

Each step of the draft model is also fed guesses of a cheap inner drafter. While the draft follows
the guesses its predictions are ready; where it leaves them the model runs again. The draft is the
same as without guesses.

Row r of the draft's cache belongs to the token at position r. Rows of accepted draft tokens stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ....ir import UnsupportedError
from ....ir.plan import StagedDraft, StagedSharedDraft
from ...cache.conversations import common
from ...feeding.draft import UnverifiedStep, VerifiedStep
from ...memo import Memo
from ..draft_cache import DraftCache
from ..drafters.grown import drafter_for
from ..level import Ids, Level
from ..setting import Setting
from ..translated import Translated, Vocabularies, same_rows
from .base import PROPOSERS, Proposer
from .hidden import level_of


class _Sequence:
    """One sequence. tokens: its text. rows: of the draft's cache that hold its text's first tokens.

    path: the draft's tokens below the text; fed: of them, how many have rows; said: what the target
    calls them. guesses: what the model was fed after the path, and not asked yet. ready: its
    predictions after the last node of the path and after each guess. alive: whether it wants
    drafts, and fits into the draft's context. open: whether this draft still grows.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.rows = 0
        self.path: list[int] = []
        self.said: list[int] = []
        self.fed = 0
        self.guesses: list[int] = []
        self.ready: list[_Place] = []
        self.alive = self.open = True

    @property
    def known(self) -> list[int]:
        """Text and path."""
        return [*self.tokens, *self.path]

    @property
    def have(self) -> int:
        """Rows of text and path."""
        return self.rows + self.fed

    def begin(self) -> None:
        """A new draft."""
        self.path, self.said, self.fed, self.guesses, self.ready = [], [], 0, [], []
        self.open = self.alive

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on; rows of the draft stay where the draft was right."""
        agreed = 0
        # The last token is the target's own: it has no row yet, whatever the draft held for it.
        for drafted, token in zip(self.path[: self.fed], tokens[:-1], strict=False):
            if drafted != token:
                break
            agreed += 1
        if self.rows == len(self.tokens):
            self.rows += agreed
        self.tokens += tokens
        self.begin()


class _Place(NamedTuple):
    """A prediction: candidates i64[K] and f32[K], logits f32[V], and what `Level.odds` says."""

    tokens: Ids
    scores: np.ndarray
    logits: np.ndarray
    odds: float


@PROPOSERS.register(StagedDraft)
class StagedProposer(Proposer):
    """steps: times that the model ran for drafts. used: guesses that saved a step."""

    record: StagedDraft
    reads = True

    def __init__(self, record: StagedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.cache = DraftCache(self.executable, record.function)
        self.inner = self.follower = drafter_for(record.drafter, setting)
        self.wants = self.inner.wants
        context = self.executable.program.info.context
        self.limit = min(context, record.context or context)
        plan = self.executable.program.plan
        # After the first level's prediction as many are wanted as the tree has further levels.
        self.levels = min(record.levels, getattr(plan.tree, "depth", None) or record.levels)
        self.steps = self.used = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.sequences = [self.sequence(prompt) for prompt in prompts]
        nothing = [0] * len(prompts)
        self.inner.ahead([()] * len(prompts), nothing)  # which tells whether it can

    def sequence(self, prompt: Sequence[int]) -> _Sequence:
        """A new text."""
        return _Sequence(prompt)

    def read(self, fed: UnverifiedStep) -> None:
        """Rows are made once there are as many as may be fed at once: what is left is the first
        draft's, and texts that never draft pay for none."""
        ends = [start + len(row) for start, row in zip(fed.starts, fed.rows, strict=True)]
        # The last token's turn comes with the first draft.
        last = [min(e, len(s.tokens) - 1) for e, s in zip(ends, self.sequences, strict=True)]
        self._catch_up(last, self.cache.widest - 1)

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        for sequence, tokens in zip(self.sequences, taken.tokens, strict=True):
            sequence.alive = sequence.alive and bool(tokens)
            if tokens:
                sequence.commit(tokens)

    def keep(self, index: int, fed: int) -> Memo:
        """rows: i64, how many are made; and what the model's own drafter keeps."""
        return {**super().keep(index, fed), "staged": torch.tensor(self.sequences[index].rows)}

    def resume(self, index: int, memo: Memo, count: int) -> None:
        if memo:
            self.sequences[index].rows = min(int(memo["staged"]), count)
        super().resume(index, memo, count)

    def bring_up(self, usual: int) -> bool:
        return any([self._catch_up(self._last(), usual), self.inner.bring_up(usual)])

    def root(self, count: int) -> Level:
        # What a draft leaves, and the target's own token, are fed with the first guesses.
        self._catch_up(self._last(), min(self.levels + 1, self.cache.widest - 2))
        for sequence in self.sequences:
            sequence.begin()
        self._ask()
        return self._level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow the one node that each draft has a level below."""
        if tokens.shape[1] != 1:
            raise UnsupportedError(
                f"draft={self.record.kind} drafts one token a level, and {tokens.shape[1]} nodes "
                f"were asked for: use tree=chain, or draft_model without a drafter of its own"
            )
        for sequence, (token,) in zip(self.sequences, tokens.tolist(), strict=True):
            own = self.own([token]) if token >= 0 else []
            sequence.open = sequence.open and bool(own)
            if not sequence.open:
                continue
            sequence.path += own
            sequence.said.append(token)
            if sequence.guesses[:1] == own:
                sequence.fed += 1
                self.used += 1
                del sequence.guesses[0], sequence.ready[0]
            else:
                sequence.guesses, sequence.ready = [], []
        self._ask()
        return self._level(count)

    # -- the model

    def own(self, tokens: list[int]) -> list[int]:
        """Tokens as the model is fed them, up to the first that it lacks."""
        return tokens

    def _last(self) -> list[int]:
        """The last token of each text, which is asked for what follows."""
        return [len(sequence.tokens) - 1 for sequence in self.sequences]

    def _catch_up(self, ends: Sequence[int], left: int) -> bool:
        """Make the rows of the texts up to `ends`, as many as fit at a time, where one lacks more
        than `left` of them; whether one did."""
        ran = False
        while True:
            rows = []
            for sequence, end in zip(self.sequences, ends, strict=True):
                last = min(end, sequence.rows + self.cache.widest) if sequence.alive else 0
                rows.append(sequence.tokens[sequence.rows : last])
            pairs = zip(self.sequences, ends, strict=True)
            if not any(one.alive and end - one.rows > left for one, end in pairs):
                return ran
            self._run(rows, None)
            ran = True
            for sequence, row in zip(self.sequences, rows, strict=True):
                sequence.rows += len(row)

    def _ask(self) -> None:
        """Run the model for the sequences whose next prediction is not there, with new guesses."""
        asking = [s.open and not s.ready and len(s.known) <= self.limit for s in self.sequences]
        if not any(asking):
            return
        pairs = list(zip(self.sequences, asking, strict=True))
        rooms = [self._room(s) if asks else 0 for s, asks in pairs]
        guesses = [self.own(g) for g in self.inner.ahead([s.said for s in self.sequences], rooms)]
        rows, select = [], []
        most = max(map(len, guesses))
        for (sequence, asks), guess in zip(pairs, guesses, strict=True):
            new = sequence.known[sequence.have :] if asks else []
            rows.append([*new, *guess])
            last = max(len(rows[-1]) - 1, 0)
            select.append([min(max(len(new) - 1, 0) + i, last) for i in range(1 + most)])
        outputs = self._run(rows, np.array(select, dtype=np.int64))
        self.steps += 1
        whole = level_of(outputs, self.executable.program.info.vocab_size)
        for index, ((sequence, asks), guess) in enumerate(zip(pairs, guesses, strict=True)):
            if asks and sequence.alive:
                self._keep(sequence, guess, whole, index)

    def _keep(self, sequence: _Sequence, guess: list[int], whole: Level, index: int) -> None:
        """Remember a sequence's predictions."""
        sequence.rows = len(sequence.tokens)
        sequence.fed, sequence.guesses = len(sequence.path), list(guess)
        assert whole.logits is not None  # a model's own function returns them
        odds = np.zeros(whole.tokens.shape[:2]) if whole.odds is None else whole.odds
        sequence.ready = [
            _Place(whole.tokens[row], whole.scores[row], whole.logits[row], float(odds[row]))
            for row in ((index, i) for i in range(1 + len(guess)))
        ]

    def _room(self, sequence: _Sequence) -> int:
        """Guesses that might be asked for."""
        have = len(sequence.known)
        levels = self.levels - 1 - len(sequence.path)
        return max(0, min(levels, self.limit - have, self.cache.widest - have + sequence.have))

    def _run(self, rows: Sequence[Sequence[int]], select: Ids | None) -> Mapping[str, torch.Tensor]:
        """Feed ragged rows; select: columns whose outputs are wanted, None for none."""
        width = max(1, *map(len, rows))
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        past = []
        for index, (sequence, row) in enumerate(zip(self.sequences, rows, strict=True)):
            tokens[index, : len(row)] = row
            # What fills a row up comes after everything that the sequence still needs.
            start = sequence.have + (0 if row else len(sequence.guesses))
            if start + width > self.limit:
                sequence.alive = sequence.open = False
            past.append(start if sequence.alive else 0)
        positions = np.array(past, dtype=np.int64)[:, None] + np.arange(width)
        wanted = np.zeros((len(rows), 1), dtype=np.int64) if select is None else select
        return self.cache.run(
            tokens, np.minimum(positions, self.limit - 1), past, wanted, silent=select is None
        )

    def _level(self, count: int) -> Level:
        """The next predictions; those of sequences that have none are -1."""
        found = [s.ready[0] if s.open and s.ready else None for s in self.sequences]
        some = next((place for place in found if place is not None), None)
        if some is None:
            nothing = np.full((len(found), 1, count), -1, dtype=np.int64)
            return Level(nothing, np.zeros(nothing.shape, dtype=np.float32))
        places = [place or some for place in found]
        level = Level(
            np.stack([place.tokens[:count] for place in places])[:, None],
            np.stack([place.scores[:count] for place in places])[:, None],
            np.stack([place.logits for place in places])[:, None],
            np.array([[place.odds] for place in places], dtype=np.float32),
        )
        level.tokens[[place is None for place in found]] = -1
        return level


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
        if self.rows == old == same:  # the rows of the draft follow
            self.rows = same = old + common(self.path, ids[old:], self.fed)
        self.rows = max(min(self.rows, same, len(ids) - 1), 0)
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
        own = torch.tensor(sequence.tokens[: sequence.rows], dtype=torch.int64)
        return {**self.inner.keep(index, fed), "own": own}

    def resume(self, index: int, memo: Memo, count: int) -> None:
        sequence = self.sequences[index]
        sequence.rows = same_rows(memo, sequence.tokens, count)
        self.inner.resume(index, memo, count)
