"""Draft by counts of what followed n-grams: in this text, in earlier texts, in a corpus.

Source: llama.cpp, common/ngram-cache and examples/lookup (Gaessler, "lookup: complement data from
context with general text statistics", 2024).

The context cache counts what followed the 1- to 4-grams of the text itself, the dynamic cache those
of earlier texts, into which a text's counts are merged when it is over, and the static cache the
2-grams of a corpus. A token is drafted from the longest n-gram that was seen often enough and whose
best successor has a large enough share of what followed it; the context cache is asked first (`lax`
thresholds), then the dynamic one (`strict`), then the static one alone. The first two weigh a
successor by its count times 100 times its count in the static cache; times 1 where it has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import numpy as np
import torch
from pydantic import Field

from ....ir import InputError
from ....ir.execution.executable import Executable
from ....ir.plan import DraftRecord, Size, record
from ....ir.plan.bounds import Filled, Nodes
from ....runtime.feeding.step_inputs import strange_ids
from ....runtime.memo import Lore, Memo
from ....runtime.speculate.drafters.base import DRAFTERS, ChainDrafter, lore_of
from ....runtime.speculate.setting import Setting
from ..corpus import END

Threshold: TypeAlias = tuple[Nodes, Annotated[int, Field(ge=0, le=100)]]
Thresholds: TypeAlias = Annotated[tuple[Threshold, ...], Field(min_length=2, max_length=16)]
"""For n-grams of 1, 2, ... tokens: least number of times seen, and least per cent of these that
their best successor has."""

STATIC = 2
"""Tokens of the static cache's n-grams."""


@record
@dataclass(frozen=True)
class NgramCacheDraft(DraftRecord):
    """The token that followed the text's last tokens most often, over and over.

    weight: i64[N] of the program, the static cache's corpus; -1 ends a document; None: there is no
    static cache. tokens: of a draft at most. lax, strict: thresholds of the context and the dynamic
    cache by n-gram size, as many sizes as n-grams are counted.
    """

    weight: Filled[str | None] = None
    tokens: Nodes = 8
    lax: Thresholds = ((2, 66), (2, 50), (1, 50), (1, 50))
    strict: Thresholds = ((4, 75), (3, 66), (2, 66), (2, 66))
    kind: ClassVar[str] = "ngram_cache"
    foresees: ClassVar[bool] = True

    def check(self) -> None:
        if len(self.lax) != len(self.strict):
            raise InputError(
                f"ngram_cache: lax has {len(self.lax)} sizes of n-grams and strict "
                f"{len(self.strict)}: give both as many"
            )

    def looks_up(self) -> Iterator[tuple[str, bool, tuple[Size, ...]]]:
        if self.weight is not None:
            yield self.weight, True, ("",)


Gram: TypeAlias = tuple[int, ...]
Followers: TypeAlias = Mapping[int, int]
NOTHING: Followers = {}

GRAMS = 400_000
"""N-grams that a generation of counts holds; two generations are kept."""


class Counts:
    """How often each token followed each n-gram. Of the n-grams that were not met for longest it
    forgets half at a time.

    >>> counts = Counts(2)
    >>> counts.read([1, 2, 1, 2, 1, 3], 0)
    >>> counts.get((1,)), counts.get((2, 1))
    ({2: 2, 3: 1}, {2: 1, 3: 1})
    """

    __slots__ = ("limit", "longest", "new", "old")

    def __init__(self, longest: int, limit: int = GRAMS) -> None:
        self.longest, self.limit = longest, limit
        self.new: dict[Gram, dict[int, int]] = {}
        self.old: dict[Gram, dict[int, int]] = {}

    def read(self, text: Sequence[int], start: int) -> None:
        """Count what followed the n-grams before each place of a text from `start` on."""
        for place in range(max(start, 1), len(text)):
            token = text[place]
            for size in range(1, min(self.longest, place) + 1):
                self.add(tuple(text[place - size : place]), token, 1)

    def add(self, gram: Gram, token: int, count: int) -> None:
        """A token followed an n-gram so many times more."""
        part = self.new.get(gram)
        if part is None:
            part = self.new[gram] = self.old.pop(gram, {})
            if len(self.new) > self.limit:
                self.old, self.new = self.new, {}
        part[token] = part.get(token, 0) + count

    def get(self, gram: Gram) -> Followers:
        """What followed an n-gram, and how often."""
        return self.new.get(gram) or self.old.get(gram) or NOTHING

    def __iter__(self) -> Iterator[tuple[Gram, Followers]]:
        yield from self.old.items()
        yield from self.new.items()


class CorpusCounts:
    """What followed the 2-grams of a corpus: sorted arrays, because a corpus may be large.

    firsts, seconds: of the 2-grams, i64[N] sorted. tokens, counts: of what followed, i64[N].
    """

    def __init__(self, corpus: torch.Tensor) -> None:
        ids = corpus.numpy()
        base = int(ids.max(initial=0)) + 1
        runs = np.stack([ids[i : len(ids) - STATIC + i] for i in range(STATIC + 1)])
        runs = runs[:, (runs != END).all(0)]
        pairs, self.base = runs[0] * base + runs[1], base
        order = np.lexsort((runs[2], pairs))
        whole = np.stack([pairs[order], runs[2][order]])
        new = np.ones(whole.shape[1], dtype=np.bool_)
        new[1:] = (whole[:, 1:] != whole[:, :-1]).any(0)
        begins = np.flatnonzero(new)
        self.pairs, self.tokens = whole[:, begins]
        self.counts = np.diff(np.append(begins, whole.shape[1]))

    def get(self, gram: Gram) -> Followers:
        """What followed a 2-gram, and how often."""
        if max(gram) >= self.base:
            return NOTHING
        pair = gram[0] * self.base + gram[1]
        first, last = np.searchsorted(self.pairs, (pair, pair + 1)).tolist()
        found = zip(self.tokens[first:last].tolist(), self.counts[first:last].tolist(), strict=True)
        return dict(found)


def chosen(followers: Followers, static: Followers, threshold: Threshold) -> int | None:
    """The token that followed most often, weighed by the static cache; None below a threshold.

    >>> chosen({7: 3, 8: 2}, {}, (2, 60)), chosen({7: 3, 8: 2}, {}, (2, 61))
    (7, None)
    >>> chosen({7: 3, 8: 2}, {8: 5}, (2, 40))
    8
    """
    seen, share = threshold
    if not followers:
        return None
    best = max(followers, key=lambda token: followers[token] * (100 * static.get(token, 0) or 1))
    total = sum(followers.values())
    if total < seen or 100 * followers[best] < share * total:
        return None
    return best


class Context:
    """A text and its counts. told: tokens whose n-grams the dynamic cache has."""

    def __init__(self, longest: int) -> None:
        self.text: list[int] = []
        self.counts = Counts(longest)
        self.told = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        before = len(self.text)
        self.text += tokens
        self.counts.read(self.text, before)


class Dynamic(Lore):
    """Counts of earlier texts. open: texts that have grown and whose counts are to come in."""

    def __init__(self, record: NgramCacheDraft) -> None:
        self.longest = len(record.lax)
        self.counts = Counts(self.longest)
        self.open: dict[int, Context] = {}

    def grows(self, context: Context) -> None:
        """A text has grown: some day its counts come in."""
        self.open[id(context)] = context

    def settle(self) -> None:
        """Merge what texts have gained."""
        for context in self.open.values():
            self.counts.read(context.text, context.told)
            context.told = len(context.text)
        self.open.clear()

    def tensors(self) -> Memo:
        """grams: i32[N,L], -1 before shorter ones. tokens: i32[N]. counts: i64[N]; the oldest
        first."""
        self.settle()
        longest = self.longest
        rows = [
            ((-1,) * (longest - len(gram)) + gram, token, count)
            for gram, part in self.counts
            for token, count in part.items()
        ]
        grams, tokens, counts = zip(*rows, strict=True) if rows else ((), (), ())
        return {
            "grams": torch.tensor(grams, dtype=torch.int32).reshape(-1, longest),
            "tokens": torch.tensor(tokens, dtype=torch.int32),
            "counts": torch.tensor(counts, dtype=torch.int64),
        }

    def take(self, memo: Memo, vocabulary: int) -> None:
        grams, tokens, counts = _checked(memo, self.longest, vocabulary)
        new = Counts(self.longest)
        for gram, token, count in zip(grams, tokens, counts, strict=True):
            new.add(tuple(t for t in gram if t >= 0), token, count)
        self.counts = new
        self.open.clear()


def _checked(memo: Memo, longest: int, vocabulary: int) -> tuple[Any, Any, Any]:
    if memo.keys() != {"grams", "tokens", "counts"}:
        raise InputError(f"expected grams, tokens and counts, got {', '.join(sorted(memo))}")
    grams, tokens, counts = memo["grams"], memo["tokens"], memo["counts"]
    sizes = {len(t) if t.dim() else -1 for t in memo.values()}
    types = [t.dtype for t in (grams, tokens, counts)]
    if types != [torch.int32, torch.int32, torch.int64] or len(sizes) != 1:
        raise InputError("expected grams i32[N,L], tokens i32[N] and counts i64[N]")
    if (grams.dim(), tokens.dim(), counts.dim()) != (2, 1, 1) or grams.shape[1] != longest:
        raise InputError(f"expected n-grams of up to {longest} tokens, got {list(grams.shape)}")
    if not len(tokens):
        return [], [], []
    if int(tokens.min()) < 0 or max(int(tokens.max()), int(grams.max())) >= vocabulary:
        raise InputError(f"token ids outside 0..{vocabulary - 1}")
    padded = grams < 0
    behind = padded[:, 1:] & ~padded[:, :-1]
    if int(grams.min()) < -1 or bool(behind.any()) or bool(padded[:, -1].any()):
        raise InputError("n-grams with gaps in them")
    if int(counts.min()) < 1 or int(counts.max()) > 2**40:
        raise InputError("counts that no text has")
    return grams.tolist(), tokens.tolist(), counts.tolist()


def static_counts(executable: Executable, weight: str | None) -> CorpusCounts | None:
    """The static cache, made at first use and kept with the executable."""
    if weight is None:
        return None
    kept: dict[str, CorpusCounts] = executable.scratch(CorpusCounts, shared=True)
    if weight not in kept:
        program = executable.program
        corpus, vocabulary = program.weights[weight].load(), program.info.vocab_size
        if len(corpus) and not END <= int(corpus.min()) <= int(corpus.max()) < vocabulary:
            named = corpus[corpus != END].tolist()
            raise strange_ids(named, vocabulary, f"the weight {weight}")
        kept[weight] = CorpusCounts(corpus)
    return kept[weight]


@DRAFTERS.register(NgramCacheDraft)
class NgramCacheDrafter(ChainDrafter):
    """Drafts token by token from three caches. See the module docstring."""

    record: NgramCacheDraft
    lore = Dynamic

    def __init__(self, record: NgramCacheDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.static = static_counts(self.executable, record.weight)
        self.dynamic: Dynamic = lore_of(self.executable, NgramCacheDrafter, record)
        self.levels, self.longest = record.tokens, len(record.lax)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        self.dynamic.settle()
        self.contexts = [Context(self.longest) for _ in prompts]
        for index, known in enumerate(self.readable(prompts)):
            self.learn(index, known, ())

    def learn(self, index: int, new: Sequence[int], row: Sequence[int]) -> None:
        self.contexts[index].extend(new)
        self.dynamic.grows(self.contexts[index])

    def chain(self, index: int, room: int) -> list[int]:
        return self._drafted(index, (), min(room, self.levels))

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        most = self.record.tokens
        return [
            self._drafted(index, extra, min(count, most))
            for index, (extra, count) in enumerate(zip(tokens, counts, strict=True))
        ]

    def _drafted(self, index: int, extra: Sequence[int], count: int) -> list[int]:
        context = self.contexts[index]
        last = (*context.text[-self.longest :], *extra)[-self.longest :]
        drafted: list[int] = []
        while len(drafted) < count and len(last) >= STATIC:
            token = self._next(context.counts, last)
            if token is None:
                break
            drafted.append(token)
            last = (*last, token)[-self.longest :]
        return drafted

    def _next(self, own: Counts, last: Gram) -> int | None:
        """What to draft after a text's last tokens."""
        record = self.record
        static = NOTHING if self.static is None else self.static.get(last[-STATIC:])
        for counts, thresholds in ((own, record.lax), (self.dynamic.counts, record.strict)):
            for size in range(len(last), 0, -1):
                token = chosen(counts.get(last[-size:]), static, thresholds[size - 1])
                if token is not None:
                    return token
        return chosen(static, NOTHING, record.lax[STATIC - 1])
