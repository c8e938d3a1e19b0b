"""A drafter with a cache whose whole chain one call makes.

The same drafts as `CachedProposer`'s under a chain: the best token of each level goes into the next
inside the function (see the pass `unroll_draft`). The rows that the levels below the first make are
not kept, and the text's rows come from the target's own features, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...ir import UnsupportedError
from ...ir.executable import Executable
from ...ir.plan import Chain, UnrolledDraft
from ..committed import Committed
from ..drafters.base import Fed, Taken
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level, Proposer


@PROPOSERS.register(UnrolledDraft)
class UnrolledProposer(Proposer):
    """See the module docstring."""

    record: UnrolledDraft
    reads = True

    def __init__(
        self, record: UnrolledDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        plan, context = executable.program.plan, executable.program.info.context
        if not isinstance(plan.tree, Chain):
            raise UnsupportedError(f"draft={record} makes chains, and the plan has {plan.tree}")
        self.depth = record.levels
        self.wants = () if record.output is None else (record.output,)
        self.committed = Committed(
            executable,
            record.chain,
            record.output,
            entry=record.entry,
            limit=min(context, record.context or context),
            ahead=record.levels - 1,
        )

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is cached of the new sequences."""
        self.committed.begin(prompts)

    def read(self, fed: Fed) -> None:
        """Make the rows of a piece of the prompts."""
        self.committed.read(fed)

    def observe(self, taken: Taken) -> None:
        """Take what the target made of the accepted tokens."""
        self.committed.observe(taken)

    def root(self, count: int) -> Level:
        """Bring the cache up to the text; the first token of the chain that follows it."""
        outputs = self.committed.catch_up()
        # A copy: outputs live until the next run.
        self.tokens: Ids = outputs["draft_tokens"].cpu().numpy().copy()
        self.tokens[self.committed.lacking] = -1
        self.place = 0
        return self._level()

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """The next token of the chain; `tokens` are the chain's own last ones."""
        self.place += 1
        return self._level()

    def _level(self) -> Level:
        tokens = self.tokens[:, self.place : self.place + 1]
        return Level(tokens, np.zeros(tokens.shape, dtype=np.float32))
