"""Draft the likeliest successors of each context, as the target last predicted them.

Sources: Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models
with Token Recycling" (2024); the tree: Wang et al., "OPT-Tree" (2025).

A table of each context's best K tokens is updated with every node that a step verified, accepted or
not. It is kept with the executable across requests.

The paper's table knows the last token only, and its tree is fixed. Here there is a table for each
context length from 1 to `context`, the longest known context decides, and the tree is grown anew
each step by acceptance rates per rank and context length. On eight unseen source files continued by
a small model, one token of context and a fixed 80-node tree, six deep, yield 3.3 tokens a step;
three tokens and that tree 4.3; three tokens and the 60 likeliest nodes, up to 16 deep, 5.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import ClassVar, TypeAlias

import torch

from ....ir import InputError
from ....ir.plan import DecodePlan, DraftRecord, Returned, policy
from ....ir.plan.bounds import Levels, Nodes, Rates
from ....ir.types import TensorType, ValueType
from ....runtime.feeding.draft import NO_DRAFT, Draft, VerifiedStep
from ....runtime.memo import Lore, Memo
from ....runtime.speculate.drafters.base import DRAFTERS, Drafter, lore_of
from ....runtime.speculate.setting import Setting

RATES = (
    (0.29, 0.09, 0.033, 0.03, 0.022, 0.02, 0.017, 0.015),
    (0.55, 0.12, 0.05, 0.028, 0.022, 0.015, 0.011, 0.01),
    (0.83, 0.076, 0.018, 0.011, 0.007, 0.005, 0.004, 0.003),
)
"""Acceptance by tokens of known context and by rank: from 2,048 tokens of source code, rounded."""


@policy
@dataclass(frozen=True)
class RecyclingDraft(DraftRecord):
    """Tables of the tokens that followed each context most likely when it was last seen.

    Drafts are the `nodes` likeliest nodes, at most `depth` deep. successors: candidates kept a
    context. context: tokens of the longest context that has a row; 1: the last token only (Token
    Recycling, Luo et al. 2024). rates: rates[c][r] is how often the candidate of rank r is accepted
    where the longest known context has c + 1 tokens.

    The paper draws 80 nodes. On a CPU a node costs time, and the first few bring the most: a step
    of eight columns costs little more than one of one, a step of 61 several times as much. Where
    wide steps are cheap, set `nodes` to 60; the pass length_goodput finds out while decoding.
    """

    nodes: Nodes = 7
    depth: Levels = 16
    successors: Nodes = 8
    context: Levels = 3
    rates: Rates = RATES
    kind: ClassVar[str] = "recycling"
    requires: ClassVar[frozenset[str]] = frozenset({"cached", "top_tokens", "trees"})
    repeatable: ClassVar[bool] = True
    branches: ClassVar[bool] = True
    foresees: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("top_tokens",)

    def calls(self, plan: DecodePlan) -> Iterator[tuple[str, Returned]]:
        yield plan.step.plain, {"top_tokens": ("", "", "K")}

    def lacking(self, step: Mapping[str, ValueType]) -> str | None:
        """See `Record.lacking`: `successors` of them, if the step says how many it returns."""
        top = step.get("top_tokens")
        given = top.dims[-1] if isinstance(top, TensorType) else None
        if isinstance(given, int) and self.successors > given:
            return (
                f"successors={self.successors}, but step returns {given} top_tokens: raise "
                f"add_top_tokens.count"
            )
        return super().lacking(step)


CONTEXTS = 50_000
"""Contexts of one length that a generation of a table holds; two generations are kept."""

Context: TypeAlias = tuple[int, ...]
_Entry: TypeAlias = tuple[float, int, int, int, Context, Context, Sequence[float], int, float]


class Table:
    """Successors by context, best first. Of the oldest contexts it forgets half at a time.

    >>> table = Table(limit=2)
    >>> for token in range(7):
    ...     table.put((token,), (7, 8))
    >>> table.get((0,)), table.get((3,)), table.get((6,))
    (None, (7, 8), (7, 8))
    """

    __slots__ = ("limit", "new", "old")

    def __init__(self, limit: int = CONTEXTS) -> None:
        self.limit = limit
        self.new: dict[Context, Context] = {}
        self.old: dict[Context, Context] = {}

    def put(self, context: Context, successors: Context) -> None:
        """The successors of a context, from now on."""
        self.new[context] = successors
        if len(self.new) > self.limit:
            self.old, self.new = self.new, {}

    def get(self, context: Context) -> Context | None:
        """The successors of a context, if they are known."""
        return self.new.get(context) or self.old.get(context)


class Tables(Lore):
    """A table for each length of context."""

    def __init__(self, record: RecyclingDraft) -> None:
        self.context, self.most = record.context, record.successors
        self.tables = [Table() for _ in range(record.context)]

    def tensors(self) -> Memo:
        """contexts.N: i32[M,N], of N tokens each; successors.N: i32[M,K], -1 where there are fewer;
        those that were not seen for longest first."""
        found: dict[str, torch.Tensor] = {}
        for size, table in enumerate(self.tables, 1):
            known = [*table.old.items(), *table.new.items()]
            rows = [(*after, *(-1,) * (self.most - len(after))) for _, after in known]
            contexts = torch.tensor([context for context, _ in known], dtype=torch.int32)
            found[f"contexts.{size}"] = contexts.reshape(-1, size)
            successors = torch.tensor(rows, dtype=torch.int32)
            found[f"successors.{size}"] = successors.reshape(-1, self.most)
        return found

    def take(self, memo: Memo, vocabulary: int) -> None:
        sizes = range(1, self.context + 1)
        wanted = {f"{name}.{size}" for name in ("contexts", "successors") for size in sizes}
        if memo.keys() != wanted:
            raise InputError(f"expected tables of contexts of 1 to {self.context} tokens")
        tables = []
        for size in sizes:
            contexts, after = memo[f"contexts.{size}"], memo[f"successors.{size}"]
            shapes = contexts.dim() == after.dim() == 2 and len(contexts) == len(after)
            if not shapes or (contexts.dtype, after.dtype) != (torch.int32, torch.int32):
                raise InputError("expected contexts i32[M,N] and successors i32[M,K]")
            if (contexts.shape[1], after.shape[1]) != (size, self.most):
                raise InputError(
                    f"expected {self.most} successors of {size} tokens, got {after.shape[1]} of "
                    f"{contexts.shape[1]}"
                )
            tables.append(_table(contexts, after, vocabulary))
        self.tables = tables


def _table(contexts: torch.Tensor, successors: torch.Tensor, vocabulary: int) -> Table:
    """A table of a file. Errors: `InputError` for ids that the vocabulary has not."""
    table = Table()
    if not len(contexts):
        return table
    # Before a text's first token there are none: -1.
    ends = contexts[:, -1]
    known = int(successors[:, 0].min()) >= 0 and int(ends.min()) >= 0
    if not known or min(int(contexts.min()), int(successors.min())) < -1:
        raise InputError("token ids below 0")
    if max(int(contexts.max()), int(successors.max())) >= vocabulary:
        raise InputError(f"token ids outside 0..{vocabulary - 1}")
    for context, after in zip(contexts.tolist(), successors.tolist(), strict=True):
        table.put(tuple(context), tuple(token for token in after if token >= 0))
    return table


@DRAFTERS.register(RecyclingDraft)
class RecyclingDrafter(Drafter):
    """Grows trees out of the tables. See the module docstring."""

    record: RecyclingDraft
    wants = ("top_tokens",)
    lore = Tables

    def __init__(self, record: RecyclingDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        known: Tables = lore_of(setting.executable, RecyclingDrafter, record)
        self.tables = known.tables
        # Ranks and contexts beyond those that were measured count as the last one.
        rows = [record.rates[min(c, len(record.rates) - 1)] for c in range(record.context)]
        most = range(record.successors)
        self.rates = [[row[min(rank, len(row) - 1)] for rank in most] for row in rows]

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Learn what followed the prompts' own contexts; start from their last tokens."""
        for prompt in self.readable(prompts):
            for size in range(1, self.record.context + 1):
                self._read(prompt, size)
        pad = (-1,) * self.record.context
        self.ends = [(*pad, *prompt)[-self.record.context :] for prompt in self.known(prompts)]

    def _read(self, prompt: Sequence[int], size: int) -> None:
        """What followed contexts of `size` tokens, the most recent first, before what is known."""
        table, most = self.tables[size - 1], self.record.successors
        found: dict[Context, list[int]] = {}
        for end in range(len(prompt) - 1, size - 1, -1):
            found.setdefault(tuple(prompt[end - size : end]), []).append(prompt[end])
        for context, tokens in found.items():
            known = table.get(context) or ()
            table.put(context, tuple(dict.fromkeys((*tokens, *known)))[:most])

    def observe(self, taken: VerifiedStep) -> None:
        """Learn the successors of the root and of every draft node."""
        best = taken.outputs["top_tokens"][..., : self.record.successors].tolist()
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            if not tokens:
                continue
            contexts = [self.ends[index]]
            for node, token in enumerate(draft.tokens):
                parent = node if draft.parents is None else draft.parents[node] + 1
                contexts.append((*contexts[parent][1:], token))
            rows = [tuple(row) for row in best[index][: len(contexts)]]
            # Where contexts are equal the last one counts: later nodes are less likely ones, so
            # they go first, and what was accepted goes last.
            path = [0, *(node + 1 for node in taken.paths[index])]
            self._learn([*range(len(contexts) - 1, -1, -1), *path], contexts, rows)
            self.ends[index] = (*self.ends[index], *tokens)[-self.record.context :]

    def _learn(
        self, order: Sequence[int], contexts: Sequence[Context], rows: Sequence[Context]
    ) -> None:
        for size, table in enumerate(self.tables, 1):
            put = table.put
            for column in order:
                put(contexts[column][-size:], rows[column])

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return [
            self._grow(end, room) if room > 0 else NO_DRAFT
            for end, room in zip(self.ends, rooms, strict=True)
        ]

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        return [
            self._chain((*end, *extra)[-self.record.context :], count)
            for end, extra, count in zip(self.ends, tokens, counts, strict=True)
        ]

    def _chain(self, context: Context, count: int) -> list[int]:
        chain: list[int] = []
        while len(chain) < min(count, self.record.depth):
            known, _ = self._successors(context)
            if not known:
                break
            chain.append(known[0])
            context = (*context[1:], known[0])
        return chain

    def _grow(self, end: Context, room: int) -> Draft:
        deepest, most = min(room, self.record.depth), self.record.nodes
        tokens: list[int] = []
        parents: list[int] = []
        heap: list[_Entry] = []
        # Entries: worth of the path, negated; order of arrival; parent; depth; the parent's
        # context, candidates and rates; the candidate's rank; worth of the parent's path.
        self._open(heap, end, -1, 1, 1.0)
        while heap and len(tokens) < most:
            worth, _, parent, depth, context, known, rates, rank, above = heappop(heap)
            node, token = len(tokens), known[rank]
            tokens.append(token)
            parents.append(parent)
            rank += 1
            if rank < len(known):
                entry = (-above * rates[rank], 2 * node, parent, depth)
                heappush(heap, (*entry, context, known, rates, rank, above))
            if depth < deepest:
                self._open(heap, (*context[1:], token), node, depth + 1, -worth)
        return Draft(tokens, None, tuple(parents)) if tokens else NO_DRAFT

    def _open(
        self, heap: list[_Entry], context: Context, node: int, depth: int, worth: float
    ) -> None:
        """The best candidate after a node; the next ones follow when it is taken."""
        known, rates = self._successors(context)
        if known:
            entry = (-worth * rates[0], 2 * node + 1, node, depth)
            heappush(heap, (*entry, context, known, rates, 0, worth))

    def _successors(self, context: Context) -> tuple[Context, Sequence[float]]:
        """Candidates after a context and their rates: the longest context that is known decides."""
        found: Context = ()
        rates: Sequence[float] = ()
        for size in range(len(self.tables), 0, -1):
            known = self.tables[size - 1].get(context[-size:])
            if known is None:
                continue
            if not found:
                found, rates = known, self.rates[size - 1]
            else:
                found = tuple(dict.fromkeys((*found, *known)))[: self.record.successors]
            if len(found) == self.record.successors:
                break
        return found, rates
