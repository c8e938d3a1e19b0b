"""A draft's cache kept in step with the committed text.

Row r belongs to position r: of a model, to the token there; of a layer on features, to the feature
there (and the token after it, where the layer takes tokens). Rows of committed text are made once,
from the target's own features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...ir.execution.executable import Executable
from ...ir.plan.inputs import BEFORE, SEEN
from ..feeding.draft import UnverifiedStep, VerifiedStep
from ..feeding.gather import rows_of
from ..memo import Memo
from .draft_cache import DraftCache, Flags, Ids
from .follower import Follower


class CommittedRows(Follower):
    """The rows of a function's cache that stand for committed text.

    output: the step's output that the function takes as ``hidden``; None: it takes tokens alone.
    entry: a function that the output goes through before, if any. limit: positions that there are
    at most; a sequence that reaches them drops out. ahead: rows that each call makes for itself
    beyond those of what it is fed. blank: the id beside features, where it is not that of the token
    after each. mutual: whether riders see each other, and not only those before. block: the last
    rows of a text of which a draft reads what was made; they see each other, and all but the first
    of them are made again with what the text gains.

    texts: the tokens of each sequence. rows: of its cache that are valid. known: positions whose
    rows can be made. features: f[known - rows, H] in pieces. alive: whether a sequence still wants
    drafts and fits. fresh: bool[B], whose last `extend` made a row.
    """

    def __init__(
        self,
        executable: Executable,
        function: str,
        output: str | None,
        *,
        entry: str | None = None,
        limit: int,
        ahead: int = 0,
        blank: int | None = None,
        mutual: bool = False,
        block: int = 1,
    ) -> None:
        self.block = block
        self.executable, self.output, self.entry, self.limit = executable, output, entry, limit
        self.blank, self.mutual = blank, mutual
        self.shift, self.ahead = 0 if output is None else 1, ahead
        self.cache = DraftCache(executable, function, ahead=ahead)
        self.takes_tokens = "tokens" in self.cache.takes
        self.source = entry or function

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        batch = len(prompts)
        self.texts = [list(prompt) for prompt in prompts]
        self.rows, self.known = [0] * batch, [0] * batch
        self.features: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.again: list[list[torch.Tensor]] = [[] for _ in prompts]
        self.alive = [True] * batch
        self.fresh = np.zeros(batch, dtype=np.bool_)

    def read(self, fed: UnverifiedStep) -> None:
        """Take a piece of the prompts. Rows are made once there are as many as may be fed at once:
        what is left is the next draft's, and steps without drafts cost none."""
        for index, (row, past) in enumerate(zip(fed.rows, fed.starts, strict=True)):
            # The last token's turn comes when it is known what follows: see `observe`.
            end = min(past + len(row), len(self.texts[index]) - 1)
            start = self.known[index]
            if end > start:
                self._learn(index, fed.outputs, range(start - past, end - past), end)
        while self._pending(self.cache.widest):
            self._extend(0, silent=True)

    def observe(self, taken: VerifiedStep) -> None:
        """Take what the target made of the accepted tokens; `catch_up` makes their rows."""
        for index, tokens in enumerate(taken.tokens):
            self.alive[index] = self.alive[index] and bool(tokens)
            if not tokens:
                continue
            first = taken.columns[index]
            path = [first, *(first + 1 + node for node in taken.paths[index])][: len(tokens)]
            self.texts[index].extend(tokens)
            known = len(self.texts[index]) - self.shift
            self._learn(index, taken.outputs, path, known)

    def keep(self, index: int, fed: int) -> Memo:
        """rows: i64, how many are made. features: f[N,H], of the positions after those; fewer than
        are known where the sequence's were dropped."""
        memo = {"rows": torch.tensor(self.rows[index])}
        if self.features[index]:
            memo["features"] = torch.cat(self.features[index])
        return memo

    def reach(self, memo: Memo, count: int) -> int:
        """See `Resumes.reach`. The row of a feature may also hold the token after it."""
        if not self.shift or count == 0:
            return count
        rows, features = _kept(memo)
        return min(count, rows + len(features)) if rows < count else count - self.takes_tokens

    def resume(self, index: int, memo: Memo, count: int) -> None:
        rows, features = _kept(memo)
        self.rows[index], self.known[index] = min(rows, count), count
        self.features[index] = [features[: count - rows]] if self.shift and count > rows else []

    def catch_up(self, riders: Ids | None = None) -> dict[str, torch.Tensor]:
        """Bring the cache up to the text; outputs [B,1+R,...] of each sequence's last row and of
        riders i64[B,R], tokens that are fed behind it and whose rows (`ahead`) do not count."""
        behind = 0 if riders is None else riders.shape[1]
        while self._pending(self.cache.widest - behind - self.block + 2):
            self._extend(1, silent=True)
        return self._extend(0, riders)

    def bring_up(self, usual: int) -> bool:
        late = self._pending(max(usual, self.block) + 1)
        while late and self._pending(self.block + 1):
            self._extend(self.block, silent=True)
        return late

    def settle(self) -> None:
        """Bring the cache up to the text, whatever that returns."""
        while self._pending(1):
            self._extend(0, silent=True)

    def advance(self, counts: Sequence[int]) -> None:
        """So many rows of text more were made of each sequence elsewhere; see `settled`."""
        self.rows = [rows + count for rows, count in zip(self.rows, counts, strict=True)]

    def settled(self, tokens: Sequence[Sequence[int]]) -> None:
        """The tokens that each text has gained, of all of which but the last there are rows."""
        for index, new in enumerate(tokens):
            self.texts[index] += new
            self.alive[index] = self.alive[index] and bool(new)
            known = len(self.texts[index]) - self.shift
            self.rows[index] = self.known[index] = min(self.rows[index], known)

    def made(self, index: int, tokens: Sequence[int]) -> None:
        """A sequence has gained tokens, and elsewhere the rows were made of all of its text but the
        last of them."""
        self.alive[index] = self.alive[index] and bool(tokens)
        self.texts[index] += tokens
        self.rows[index] = self.known[index] = len(self.texts[index]) - self.shift

    def look_ahead(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `catch_up`, with one row more: that of the last token, whose feature f[B,1,H] the
        target has not said yet. It does not count, and is made again when it has."""
        for index, pieces in enumerate(self.features):
            pieces.append(features[index].clone())
            self.known[index] += 1
        outputs = self.catch_up()
        self.rows = [rows - int(made) for rows, made in zip(self.rows, self.fresh, strict=True)]
        self.known = [known - 1 for known in self.known]
        return outputs

    def place(self, index: int, past: int, count: int) -> int:
        """Where a sequence's `count` tokens go; at the end of the context it drops out."""
        if past + count + self.ahead > self.limit:
            self.alive[index] = False
        return past if self.alive[index] else 0

    def seen(self, positions: Ids) -> Ids | None:
        """How many rows of the target's states the tokens of these rows i64[B,N] see: those of the
        text before each, of which the target has read all but the last token. None: the function
        reads none."""
        if SEEN not in self.cache.takes:
            return None
        read = np.array([[len(text) - 1] for text in self.texts], dtype=np.int64)
        return np.minimum(positions + self.shift, read)

    def before(self, past: Sequence[int], count: int) -> Ids | None:
        """The two tokens before each of `count` ones i64[B,N,2] from these rows of the texts on,
        which may be behind their ends. None: the function reads none."""
        if BEFORE not in self.cache.takes:
            return None
        found = np.zeros((len(past), count, 2), dtype=np.int64)
        for text, row, pairs in zip(self.texts, past, found, strict=True):
            places = row + self.shift - 2 + np.arange(count)[:, None] + np.arange(2)
            start = max(row + self.shift - 2, 0)
            some = np.array(text[start : start + count + 2] or [0], dtype=np.int64)
            pairs[:] = some[(places - start).clip(0, len(some) - 1)]
        return found

    @property
    def lacking(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """bool[B], sequences of which nothing is known that a draft could start from."""
        return ~(np.array(self.alive) & self.fresh)

    def _learn(
        self, index: int, outputs: Mapping[str, torch.Tensor], columns: Sequence[int], known: int
    ) -> None:
        """The features in these columns are those of the positions up to `known`."""
        if self.output is not None:
            # Copies: outputs do not outlive the call.
            self.features[index].append(rows_of(outputs[self.output], index, columns))
        self.known[index] = known

    def _pending(self, least: int) -> bool:
        """Whether a sequence lacks so many rows."""
        counts = zip(self.rows, self.known, self.alive, strict=True)
        return any(alive and known - rows >= least for rows, known, alive in counts)

    def _extend(
        self, spare: int, riders: Ids | None = None, *, silent: bool = False
    ) -> dict[str, torch.Tensor]:
        """Make missing rows, as many as may be fed at once, and leave `spare` of each sequence's;
        the outputs of each sequence's last one and of the riders behind it, unless silent."""
        if not silent:
            self._make_again()
        missing = [known - rows for rows, known in zip(self.rows, self.known, strict=True)]
        behind = 0 if riders is None else riders.shape[1]
        widest = self.cache.widest - behind
        counts = [min(max(count - spare, 0), widest) for count in missing]
        past = [self.place(b, self.rows[b], count) for b, count in enumerate(counts)]
        counts = [count if alive else 0 for count, alive in zip(counts, self.alive, strict=True)]
        width = max(*counts, self.block) + behind
        tokens = np.zeros((len(counts), width), dtype=np.int64)
        for index, (rows, count) in enumerate(zip(past, counts, strict=True)):
            if self.blank is not None:
                tokens[index, :count] = self.blank
            elif self.takes_tokens:
                start = rows + self.shift
                tokens[index, :count] = self.texts[index][start : start + count]
            if riders is not None:
                tokens[index, count : count + behind] = riders[index]
        positions = np.minimum(
            np.array(past, dtype=np.int64)[:, None] + np.arange(width), self.limit - 1
        )
        ends = np.maximum(np.array(counts, dtype=np.int64) - self.block, 0)
        select = ends[:, None] + np.arange(self.block + behind)
        features = self._features(counts, width) if self.shift else None
        beside = block_sees(counts, width, behind) if self.mutual and behind else None
        if self.block > 1:
            beside = block_sees(ends.tolist(), width, self.block)
        given = tokens, positions, past, select, features, beside
        outputs = self.cache.run(
            *given, seen=self.seen(positions), before=self.before(past, width), silent=silent
        )
        self.rows = [rows + count for rows, count in zip(self.rows, counts, strict=True)]
        self.fresh = np.array(counts) >= self.block
        return outputs

    def _make_again(self) -> None:
        """Take back the rows of each text's last block that see what it has gained since."""
        for index, pieces in enumerate(self.again):
            if pieces and self.known[index] > self.rows[index]:
                self.rows[index] -= len(pieces[0])
                self.features[index] = pieces + self.features[index]
                self.again[index] = []

    def _features(self, counts: Sequence[int], width: int) -> torch.Tensor:
        """Take out the next features of each sequence, f[B,W,H] with W >= width."""
        blank = self.cache.blank(len(counts), width, self.source)
        for index, (pieces, count) in enumerate(zip(self.features, counts, strict=True)):
            if count:
                whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                blank[index, :count] = whole[:count]
                pieces[:] = [whole[count:]] if count < len(whole) else []
                if self.block > 1:
                    made = torch.cat([*self.again[index], whole[:count]])
                    self.again[index] = [made[1 - self.block :].clone()]
            elif not self.alive[index]:
                pieces.clear()
        if self.entry is None:
            return blank
        return self.executable.run(self.entry, {"hidden": blank}, ("hidden",))["hidden"]


def block_sees(counts: Sequence[int], width: int, behind: int) -> Flags:
    """bool[B,W,W], what each column of a call sees of it: a text's what precedes it, and each of
    the `behind` columns after a sequence's own all of these and each other."""
    seen = np.broadcast_to(np.tri(width, dtype=np.bool_), (len(counts), width, width)).copy()
    for index, count in enumerate(counts):
        seen[index, count : count + behind, : count + behind] = True
    return seen


def _kept(memo: Memo) -> tuple[int, torch.Tensor]:
    """Rows, and the features of the positions after them; of nothing, none."""
    if not memo:
        return 0, torch.empty(0, 0)
    return int(memo["rows"]), memo.get("features", torch.empty(0, 0))
