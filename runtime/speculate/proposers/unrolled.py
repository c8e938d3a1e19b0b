"""A drafter with a cache whose whole chain one call makes (see the pass `unroll_draft`).

The drafts are `CachedProposer`'s under a chain of best tokens. Under sampling, which draws from
each level's distribution, the function that was unrolled makes the chain level by level.
"""

from __future__ import annotations

import numpy as np

from ....ir.plan import UnrolledDraft
from ..level import Ids, Level
from ..setting import Setting
from .base import PROPOSERS
from .cached import CachedProposer


@PROPOSERS.register(UnrolledDraft)
class UnrolledProposer(CachedProposer):
    """See the module docstring."""

    def __init__(self, record: UnrolledDraft, setting: Setting) -> None:
        self.by_level = setting.options.do_sample
        if not self.by_level:  # one call makes a row for each level below the first
            self.function, self.ahead = record.chain, record.draft.levels - 1
        super().__init__(record.draft, setting)

    def root(self, count: int) -> Level:
        if self.by_level:
            return super().root(count)
        outputs = self.committed.catch_up()
        # A copy: outputs live until the next run.
        self.tokens: Ids = outputs["draft_tokens"].cpu().numpy().copy()
        self.tokens[self.committed.lacking] = -1
        self.place = 0
        return self._next()

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """The next token of the chain; `tokens` are the chain's own last ones."""
        if self.by_level:
            return super().grow(tokens, parents, count)
        self.place += 1
        return self._next()

    def _next(self) -> Level:
        tokens = self.tokens[:, self.place : self.place + 1]
        return Level(tokens, np.zeros(tokens.shape, dtype=np.float32))
