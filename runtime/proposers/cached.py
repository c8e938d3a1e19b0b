"""Drafters with a KV cache of their own: a layer on the target's features, or another model.

Sources: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024) and
"EAGLE-2" (2024); Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023), Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).

Row r of the draft's cache belongs to position r of the text: of a model, to the token there; of a
layer on features, to the feature there and the token after it. Rows of committed text are made once
and from the target's own features; rows of draft nodes are forgotten after each draft.

Nodes of a tree may see their ancestors but not each other's, and a step knows who continues whom
only among its own tokens. So each level feeds all nodes of the tree so far again. While there is
one node a level it is everything's ancestor, and its row counts as past: a chain feeds one token a
level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...ir.executable import Executable
from ...ir.plan import CachedDraft
from ..draft_cache import DraftCache, Flags
from ..drafters.base import Fed, Taken
from ..options import GenerationOptions
from .base import PROPOSERS, Ids, Level, Proposer
from .hidden import level_of


class _Nodes:
    """The nodes of a draft that are fed again with each level.

    tokens: i64[B,N]. given: f[B,N,H], the feature beside each token. seen: bool[B,N,N], ancestors.
    depths: i64[N], levels below `above`; last: the first node of the last level. above: rows of the
    one-node levels over all of them.
    """

    def __init__(self, batch: int, above: int = 0) -> None:
        self.tokens: Ids = np.empty((batch, 0), dtype=np.int64)
        self.given: torch.Tensor | None = None
        self.seen: Flags = np.empty((batch, 0, 0), dtype=np.bool_)
        self.depths: Ids = np.empty(0, dtype=np.int64)
        self.last = 0
        self.above = above

    def add(self, tokens: Ids, parents: Ids, given: torch.Tensor | None) -> None:
        """A level below the last one; parents are places in that."""
        batch, have = self.tokens.shape
        count = tokens.shape[1]
        seen = np.zeros((batch, have + count, have + count), dtype=np.bool_)
        seen[:, :have, :have] = self.seen
        if have:
            places = self.last + parents
            seen[:, have:, :have] = self.seen[np.arange(batch)[:, None], places]
        seen[:, have:, have:] = np.eye(count, dtype=np.bool_)
        depth = self.depths[-1] + 1 if have else 0
        self.tokens = np.concatenate([self.tokens, tokens.clip(min=0)], 1)
        self.depths = np.concatenate([self.depths, np.full(count, depth)])
        if given is not None:
            self.given = given if self.given is None else torch.cat([self.given, given], 1)
        self.seen, self.last = seen, have


@PROPOSERS.register(CachedDraft)
class CachedProposer(Proposer):
    """Keeps the draft's cache in step with the text. See the module docstring.

    texts: the tokens of each sequence. rows: of its draft cache that are valid. known: positions
    whose rows can be made. features: f[known - rows, H] in pieces, where the draft takes features.
    alive: whether it still wants drafts, and fits into the draft's context.
    """

    record: CachedDraft
    reads = True

    def __init__(
        self, record: CachedDraft, executable: Executable, options: GenerationOptions
    ) -> None:
        super().__init__(record, executable, options)
        self.depth = record.levels
        self.wants = () if record.output is None else (record.output,)
        self.shift = 0 if record.output is None else 1
        self.cache = DraftCache(executable, record.function)
        context = executable.program.info.context
        self.limit = min(context, record.context or context)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Nothing is cached of the new sequences."""
        batch = len(prompts)
        self.texts = [list(prompt) for prompt in prompts]
        self.rows, self.known = [0] * batch, [0] * batch
        self.features: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.alive = [True] * batch

    def read(self, fed: Fed) -> None:
        """Make the rows of a piece of the prompts."""
        for index, (row, past) in enumerate(zip(fed.rows, fed.past, strict=True)):
            # The last token's turn comes when it is known what follows: see `observe`.
            end = min(past + len(row), len(self.texts[index]) - 1)
            start = self.known[index]
            if end > start:
                self._learn(index, fed.outputs, range(start - past, end - past), end)
        while self._pending(1):
            self._extend(0, silent=True)

    def observe(self, taken: Taken) -> None:
        """Take what the target made of the accepted tokens; the next draft makes their rows."""
        for index, tokens in enumerate(taken.tokens):
            self.alive[index] = self.alive[index] and bool(tokens)
            if not tokens:
                continue
            first = taken.columns[index]
            path = [first, *(first + 1 + node for node in taken.paths[index])][: len(tokens)]
            self.texts[index].extend(tokens)
            known = len(self.texts[index]) - self.shift
            self._learn(index, taken.outputs, path, known)

    def root(self, count: int) -> Level:
        """Bring the cache up to the text; what may follow its last token."""
        while self._pending(self.cache.widest + 1):
            self._extend(1, silent=True)
        outputs = self._extend(0)
        self.nodes = _Nodes(len(self.texts))
        self.carried = outputs.get("hidden")
        return self._level(outputs, count)

    def grow(self, tokens: Ids, parents: Ids, count: int) -> Level:
        """What may follow each node, from its own token and its parent's predicted feature."""
        if self.nodes.tokens.shape[1] == 1:
            self.nodes = _Nodes(len(self.texts), self.nodes.above + 1)
        given = None if self.carried is None else _gathered(self.carried, parents)
        nodes = self.nodes
        nodes.add(tokens, parents, given)
        total = nodes.tokens.shape[1]
        past = [self._place(b, rows + nodes.above, total) for b, rows in enumerate(self.rows)]
        outputs = self.cache.run(
            nodes.tokens,
            np.array(past, dtype=np.int64)[:, None] + nodes.depths,
            past,
            np.broadcast_to(np.arange(nodes.last, total), tokens.shape),
            nodes.given,
            nodes.seen if total > 1 else None,
        )
        self.carried = outputs.get("hidden")
        return self._level(outputs, count)

    def _place(self, index: int, past: int, count: int) -> int:
        """Where a sequence's `count` tokens go; at the end of the context it drops out."""
        if past + count > self.limit:
            self.alive[index] = False
        return past if self.alive[index] else 0

    def _level(self, outputs: Mapping[str, torch.Tensor], count: int) -> Level:
        level = level_of(outputs, count)
        level.tokens[~(np.array(self.alive) & self.fresh)] = -1
        return level

    # -- the committed text

    def _learn(
        self, index: int, outputs: Mapping[str, torch.Tensor], columns: Sequence[int], known: int
    ) -> None:
        """The features in these columns are those of the positions up to `known`."""
        if self.record.output is not None:
            hidden = outputs[self.record.output][index]
            # Indexing copies: outputs do not outlive the call.
            self.features[index].append(hidden[torch.tensor(columns, device=hidden.device)])
        self.known[index] = known

    def _pending(self, least: int) -> bool:
        """Whether a sequence lacks so many rows."""
        counts = zip(self.rows, self.known, self.alive, strict=True)
        return any(alive and known - rows >= least for rows, known, alive in counts)

    def _extend(self, spare: int, silent: bool = False) -> dict[str, torch.Tensor]:
        """Make missing rows, as many as may be fed at once, and leave `spare` of each sequence's;
        the outputs of each sequence's last one, unless silent."""
        missing = [known - rows for rows, known in zip(self.rows, self.known, strict=True)]
        counts = [min(max(count - spare, 0), self.cache.widest) for count in missing]
        past = [self._place(b, self.rows[b], count) for b, count in enumerate(counts)]
        counts = [count if alive else 0 for count, alive in zip(counts, self.alive, strict=True)]
        width = max(*counts, 1)
        tokens = np.zeros((len(counts), width), dtype=np.int64)
        for index, (rows, count) in enumerate(zip(past, counts, strict=True)):
            start = rows + self.shift
            tokens[index, :count] = self.texts[index][start : start + count]
        positions = np.minimum(
            np.array(past, dtype=np.int64)[:, None] + np.arange(width), self.limit - 1
        )
        select = np.maximum(np.array(counts, dtype=np.int64) - 1, 0)[:, None]
        features = self._features(counts, width) if self.shift else None
        outputs = self.cache.run(tokens, positions, past, select, features, silent=silent)
        self.rows = [rows + count for rows, count in zip(self.rows, counts, strict=True)]
        self.fresh = np.array(counts) > 0
        return outputs

    def _features(self, counts: Sequence[int], width: int) -> torch.Tensor:
        """The next features of each sequence, f[B,width,H], which are then kept no longer."""
        blank = self.cache.blank(len(counts), width)
        for index, (pieces, count) in enumerate(zip(self.features, counts, strict=True)):
            if count:
                whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                blank[index, :count] = whole[:count]
                pieces[:] = [whole[count:]] if count < len(whole) else []
            elif not self.alive[index]:
                pieces.clear()
        return blank


def _gathered(features: torch.Tensor, places: Ids) -> torch.Tensor:
    """Rows of f[B,M,H] by i64[B,N]."""
    columns = torch.from_numpy(places.copy()).to(features.device)
    return features[torch.arange(len(places), device=features.device)[:, None], columns]
