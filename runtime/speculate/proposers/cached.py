"""Drafters with a KV cache of their own: a layer on the target's features, or another model.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024) and
"EAGLE-2" (2024); Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023), Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).

Rows of committed text are made once (see `CommittedRows`); rows of draft nodes are dropped after
each draft. A chain feeds one token a level. A tree feeds all of its nodes again at each level: a
call knows ancestors only among its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from ....ir.plan import CachedDraft
from ...feeding.gather import gathered
from ..committed import CommittedRows
from ..draft_cache import Flags
from ..level import Ids, Level
from ..setting import Setting
from .base import PROPOSERS, Proposer
from .hidden import level_of


class _Nodes:
    """The nodes of a draft that are fed again with each level.

    tokens: i64[B,N]. given: f[B,N,H], the feature beside each token. before: i64[B,N,2], the two
    tokens before each, where the function takes them. seen: bool[B,N,N], ancestors.
    depths: i64[N], levels below `above`; last: the first node of the last level. above: rows of the
    one-node levels over all of them. size: how many nodes are a block, which see each other, and
    whose depths count up.
    """

    def __init__(self, batch: int, above: int = 0, size: int = 1) -> None:
        self.tokens: Ids = np.empty((batch, 0), dtype=np.int64)
        self.given: torch.Tensor | None = None
        self.before: Ids | None = None
        self.seen: Flags = np.empty((batch, 0, 0), dtype=np.bool_)
        self.depths: Ids = np.empty(0, dtype=np.int64)
        self.last = 0
        self.above, self.size = above, size

    def add(
        self, tokens: Ids, parents: Ids, given: torch.Tensor | None, before: Ids | None
    ) -> None:
        """A level below the last one; parents are places in that, of blocks where there are."""
        batch, have = self.tokens.shape
        count = tokens.shape[1]
        seen = np.zeros((batch, have + count, have + count), dtype=np.bool_)
        seen[:, :have, :have] = self.seen
        if have:
            places = self.last + (parents * self.size).repeat(self.size, 1)
            seen[:, have:, :have] = self.seen[np.arange(batch)[:, None], places]
        blocks = count // self.size
        own = np.ones((self.size, self.size), dtype=np.bool_)
        seen[:, have:, have:] = np.kron(np.eye(blocks, dtype=np.bool_), own)
        depth = self.depths[-1] + 1 if have else 0
        self.tokens = np.concatenate([self.tokens, tokens.clip(min=0)], 1)
        self.depths = np.concatenate([self.depths, depth + np.tile(np.arange(self.size), blocks)])
        if given is not None:
            self.given = given if self.given is None else torch.cat([self.given, given], 1)
        if before is not None:
            have_some = self.before is not None
            self.before = np.concatenate([self.before, before], 1) if have_some else before
        self.seen, self.last = seen, have


@PROPOSERS.register(CachedDraft)
class CachedProposer(Proposer):
    """Feeds draft nodes behind the rows of the committed text. See the module docstring.

    made: the outputs of the last call, of the nodes of its last level. ends: i64[B,M,2], the last
    two tokens down to each of them, if the function takes those before a token. function: whose
    cache holds the text's rows. ahead, blank, mutual, block: see `CommittedRows`; nodes are fed in
    blocks, too.
    """

    record: CachedDraft
    reads = True
    made: Mapping[str, torch.Tensor]
    ends: Ids | None = None
    function: str = ""
    ahead: int = 0
    blank: int | None = None
    mutual: bool = False
    block: int = 1

    def __init__(self, record: CachedDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.wants = () if record.output is None else (record.output,)
        context = self.executable.program.info.context
        limit = min(context, record.context or context)
        self.function = self.function or record.function
        self.committed = self.follower = self._rows(limit)

    def _rows(self, limit: int) -> CommittedRows:
        """The rows of the committed text, of positions below `limit`."""
        return CommittedRows(
            self.executable,
            self.function,
            self.record.output,
            entry=self.record.entry,
            limit=limit,
            ahead=self.ahead,
            blank=self.blank,
            mutual=self.mutual,
            block=self.block,
        )

    def root(self, count: int) -> Level:
        outputs = self.committed.catch_up()
        self.nodes = self.no_nodes(0)
        committed = self.committed
        ends = [len(text) - committed.shift for text in committed.texts]
        self.ends = committed.before(ends, 1)
        return self._level(outputs, count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow each node, from its own token and its parent's predicted feature."""
        carried = self.made.get("hidden")
        given = None if carried is None else gathered(carried, parents)
        return self._level(self.fed(tokens, parents, given), count)

    def no_nodes(self, above: int) -> _Nodes:
        """Nothing, below so many rows of the draft."""
        return _Nodes(len(self.committed.texts), above, self.block)

    def fed(self, tokens: Ids, parents: Ids, given: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What the function makes of a level more: see `_Nodes.add`."""
        committed = self.committed
        if self.nodes.tokens.shape[1] == self.block:
            self.nodes = self.no_nodes(self.nodes.above + self.block)
        nodes = self.nodes
        nodes.add(tokens, parents, given, self._before(tokens, parents))
        total = nodes.tokens.shape[1]
        rows = [count + nodes.above for count in committed.rows]
        past = [committed.place(index, row, total) for index, row in enumerate(rows)]
        positions = np.array(past, dtype=np.int64)[:, None] + nodes.depths
        return committed.cache.run(
            nodes.tokens,
            positions,
            past,
            np.broadcast_to(np.arange(nodes.last, total), tokens.shape),
            nodes.given,
            nodes.seen if total > 1 else None,
            seen=committed.seen(positions),
            before=nodes.before,
        )

    def _before(self, tokens: Ids, parents: Ids) -> Ids | None:
        """The two tokens before each of a level's; None: the function reads none."""
        if self.ends is None:
            return None
        above = np.take_along_axis(self.ends, parents[:, :, None], 1)
        self.ends = np.concatenate([above[:, :, 1:], tokens[:, :, None].clip(min=0)], 2)
        return above

    def _level(self, outputs: Mapping[str, torch.Tensor], count: int) -> Level:
        self.made = outputs
        level = level_of(outputs, count)
        level.tokens[self.committed.lacking] = -1
        return level
