"""A draft model that draws a chain, and keeps the rows of drafted tokens that were right.

Row r of its cache belongs to the token at position r. Where the model runs in parts, each has as
many rows as it was run on: the later parts may lack some that the earlier ones have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ....ir import UnsupportedError
from ...feeding.draft import UnverifiedStep, VerifiedStep
from ...memo import Memo
from ..draft_cache import DraftCache
from ..level import Ids, Level
from ..setting import Setting
from .base import Proposer


class Place(NamedTuple):
    """A prediction: candidates i64[K] and f32[K], logits f32[V], and what `Level.odds` says."""

    tokens: Ids
    scores: np.ndarray
    logits: np.ndarray
    odds: float


class KeptSequence:
    """One sequence. tokens: its text. path: the draft's tokens below the text. rows: by part of the
    model, of how many of text and path there are rows.

    ready: predictions after the last node of the path, and what follows them. alive: whether it
    wants drafts, and fits into the draft's context. open: whether this draft still grows.
    """

    def __init__(self, tokens: Sequence[int], parts: int = 1) -> None:
        self.tokens = list(tokens)
        self.rows = [0] * parts
        self.path: list[int] = []
        self.ready: list[Place] = []
        self.alive = self.open = True

    @property
    def known(self) -> list[int]:
        """Text and path."""
        return [*self.tokens, *self.path]

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.tokens) + len(self.path)

    @property
    def end(self) -> int:
        """The first row behind all that is still needed."""
        return self.rows[0]

    def begin(self) -> None:
        """A new draft."""
        self.path, self.ready = [], []
        self.rows = [min(rows, len(self.tokens)) for rows in self.rows]
        self.open = self.alive

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on; rows of the draft stay where the draft was right."""
        same = len(self.tokens)
        # The last token is the target's own: it has no row yet, whatever the draft held for it.
        for drafted, token in zip(self.path, tokens[:-1], strict=False):
            if drafted != token:
                break
            same += 1
        self.rows = [min(rows, same) for rows in self.rows]
        self.tokens += tokens
        self.begin()


class KeepingProposer(Proposer):
    """See the module. caches: of the model's parts, in order. steps: times that predictions were
    asked for."""

    reads = True
    caches: list[DraftCache]

    def __init__(self, record: Any, setting: Setting, functions: Sequence[str]) -> None:
        super().__init__(record, setting)
        self.caches = [DraftCache(self.executable, function) for function in functions]
        self.widest: int = min(cache.widest for cache in self.caches)
        context = self.executable.program.info.context
        self.limit = min(context, record.context or context)
        plan = self.executable.program.plan
        # After the first level's prediction as many are wanted as the tree has further levels.
        self.levels: int = min(record.levels, getattr(plan.tree, "depth", None) or record.levels)
        self.steps = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.sequences = [self.sequence(prompt) for prompt in prompts]

    @abstractmethod
    def sequence(self, prompt: Sequence[int]) -> Any:
        """A new text: a `KeptSequence`."""

    def read(self, fed: UnverifiedStep) -> None:
        """Rows are made once there are as many as may be fed at once: what is left is the first
        draft's, and texts that never draft pay for none."""
        ends = [start + len(row) for start, row in zip(fed.starts, fed.rows, strict=True)]
        # The last token's turn comes with the first draft.
        last = [min(e, len(s.tokens) - 1) for e, s in zip(ends, self.sequences, strict=True)]
        self._catch_up(last, self.widest - 1)

    def observe(self, taken: VerifiedStep) -> None:
        super().observe(taken)
        for sequence, tokens in zip(self.sequences, taken.tokens, strict=True):
            sequence.alive = sequence.alive and bool(tokens)
            if tokens:
                sequence.commit(tokens)

    def keep(self, index: int, fed: int) -> Memo:
        """kept.0 and so on: i64, how many rows of the text each part has."""
        sequence = self.sequences[index]
        made = {
            f"kept.{part}": torch.tensor(min(rows, len(sequence.tokens)))
            for part, rows in enumerate(sequence.rows)
        }
        return {**super().keep(index, fed), **made}

    def reach(self, memo: Memo, count: int) -> int:
        """What rows are lacking is made of the text's tokens."""
        return count if self.follower is None else super().reach(memo, count)

    def resume(self, index: int, memo: Memo, count: int) -> None:
        if memo:
            sequence = self.sequences[index]
            made = [int(memo[f"kept.{part}"]) for part in range(len(sequence.rows))]
            sequence.rows = [min(rows, count) for rows in made]
        super().resume(index, memo, count)

    def bring_up(self, usual: int) -> bool:
        return self._catch_up(self._last(), usual)

    def root(self, count: int) -> Level:
        # What a draft leaves, and the target's own token, are fed with the first question.
        self._catch_up(self._last(), min(self.levels + 1, self.widest - 2))
        for sequence in self.sequences:
            sequence.begin()
        self._ask()
        return self._level(count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow the one node that each draft has a level below."""
        if tokens.shape[1] != 1:
            raise UnsupportedError(
                f"draft={self.record.kind} drafts one token a level, and {tokens.shape[1]} nodes "
                f"were asked for: use tree=chain, or draft_model alone"
            )
        for sequence, (token,) in zip(self.sequences, tokens.tolist(), strict=True):
            own = self.own([token]) if token >= 0 else []
            sequence.open = sequence.open and bool(own)
            if sequence.open:
                sequence.path += own
                self.went_on(sequence, own, token)
        self._ask()
        return self._level(count)

    # -- the model

    def own(self, tokens: list[int]) -> list[int]:
        """Tokens as the model is fed them, up to the first that it lacks."""
        return tokens

    def went_on(self, sequence: Any, own: list[int], token: int) -> None:
        """The draft has a token more, `own`; the target calls it `token`."""
        sequence.ready = []

    @abstractmethod
    def ask(self, asking: Sequence[bool]) -> None:
        """Have the model predict what follows the path of the sequences that ask (`ready`)."""

    def _ask(self) -> None:
        """Ask for the sequences whose next prediction is not there."""
        asking = [s.open and not s.ready and s.size <= self.limit for s in self.sequences]
        if any(asking):
            self.steps += 1
            self.ask(asking)

    def _last(self) -> list[int]:
        """The last token of each text, which is asked for what follows."""
        return [len(sequence.tokens) - 1 for sequence in self.sequences]

    def _catch_up(self, ends: Sequence[int], left: int, part: int = 0) -> bool:
        """Make the rows of the texts up to `ends`, as many as fit at a time, where one lacks more
        than `left` of them; whether one did."""
        ran = False
        while True:
            pairs = zip(self.sequences, ends, strict=True)
            if not any(one.alive and end - one.rows[part] > left for one, end in pairs):
                return ran
            rows = []
            for sequence, end in zip(self.sequences, ends, strict=True):
                last = min(end, sequence.rows[part] + self.widest) if sequence.alive else 0
                rows.append(sequence.known[sequence.rows[part] : last])
            self.run(rows, None, part)
            ran = True
            for sequence, row in zip(self.sequences, rows, strict=True):
                sequence.rows[part] += len(row)

    def run(
        self, rows: Sequence[Sequence[int]], select: Ids | None, part: int = 0
    ) -> Mapping[str, torch.Tensor]:
        """Feed ragged rows to a part of the model, behind those that it has; select: columns whose
        outputs are wanted, None for none."""
        width = max(1, *map(len, rows))
        tokens = np.zeros((len(rows), width), dtype=np.int64)
        past = []
        for index, (sequence, row) in enumerate(zip(self.sequences, rows, strict=True)):
            tokens[index, : len(row)] = row
            # What fills a row up comes after everything that the sequence still needs.
            start = sequence.rows[part] if row else sequence.end
            if start + width > self.limit:
                sequence.alive = sequence.open = False
            past.append(start if sequence.alive else 0)
        positions = np.array(past, dtype=np.int64)[:, None] + np.arange(width)
        wanted = np.zeros((len(rows), 1), dtype=np.int64) if select is None else select
        return self.caches[part].run(
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


def places_of(whole: Level, index: int) -> list[Place]:
    """A sequence's predictions, column by column."""
    assert whole.logits is not None  # a model's own function returns them
    odds = np.zeros(whole.tokens.shape[:2]) if whole.odds is None else whole.odds
    return [
        Place(whole.tokens[row], whole.scores[row], whole.logits[row], float(odds[row]))
        for row in ((index, column) for column in range(whole.tokens.shape[1]))
    ]
