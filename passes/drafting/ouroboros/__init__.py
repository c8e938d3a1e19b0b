"""Phrases: what followed a token, pooled from texts and from what the target says of rejected
drafts. They speed up the making of drafts, and lengthen them.

Source: Zhao et al., "Ouroboros: Generating Longer Drafts Phrase by Phrase for Faster Speculative
Decoding" (2024), and its public code.

The pool has for each token the last few phrases that followed it. They come from the texts; from
rejected parts of drafts, where the target says the same as the draft for a while, one place on; and
a phrase that was drafted and not said becomes what the target said along it. A model that drafts
checks phrases as guesses of its own next tokens (`StagedDraft`), and when its draft is done, the
latest phrases that follow its last token are verified behind it, as branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch

from ....ir import InputError
from ....ir.plan import DraftRecord, policy
from ....ir.plan.bounds import Filled, Levels, Nodes
from ....runtime.feeding.draft import Draft, VerifiedStep
from ....runtime.feeding.outputs import integers
from ....runtime.memo import Lore, Memo
from ....runtime.speculate.drafters.base import DRAFTERS, Drafter, lore_of
from ....runtime.speculate.drafters.combining import CombiningDrafter
from ....runtime.speculate.setting import Setting
from ....runtime.speculate.trie import Trie

if TYPE_CHECKING:  # a plan holds records, and their methods take plans
    from ....ir.plan import DecodePlan


@policy
@dataclass(frozen=True)
class PhrasesDraft(DraftRecord):
    """Phrases that followed the text's last token, the latest ones, as branches (Ouroboros).

    tokens: of a phrase. pool: phrases that are kept for each token. phrases: of these, how many
    are verified. Needs the step's ``argmax`` (pass add_argmax).
    """

    tokens: Levels = 4
    pool: Nodes = 15
    phrases: Nodes = 3
    kind: ClassVar[str] = "phrases"
    requires: ClassVar[frozenset[str]] = frozenset({"argmax", "cached", "trees"})
    branches: ClassVar[bool] = True
    foresees: ClassVar[bool] = True

    @property
    def most(self) -> int:
        """Nodes of all phrases."""
        return self.tokens * self.phrases


@policy
@dataclass(frozen=True)
class LengthenedDraft(DraftRecord):
    """A drafter's chains, and behind each of them what another drafter holds for likely there.

    of: a drafter that predicts level by level, and one that knows what may follow text that is not
    committed. Where the first has no draft, the second begins at the text's last token.
    """

    of: Filled[tuple[DraftRecord, ...]] = ()
    kind: ClassVar[str] = "lengthened"
    requires: ClassVar[frozenset[str]] = frozenset({"drafts", "trees"})
    provides: ClassVar[frozenset[str]] = frozenset()
    branches: ClassVar[bool] = True

    def into(self, plan: DecodePlan) -> DecodePlan:
        """See `Record.into`. Errors: `InputError` for a plan that has not two such drafters."""
        parts = plan.draft.parts if plan.draft.in_turn else ()
        if len(parts) != 2 or not parts[0].grows or not parts[1].foresees:
            raise InputError(
                f"expected a drafter that predicts level by level, such as draft_model, and then "
                f"one that copies, such as draft_phrases; got draft={plan.draft.brief}"
            )
        return replace(plan, draft=replace(self, of=parts))

    def at_most(self, tree: int | None) -> int:
        return sum(part.at_most(tree) for part in self.of)

    def misfits(self, plan: DecodePlan) -> Iterator[str]:
        """See `Record.misfits`: a first drafter whose drafts are no chains."""
        if not plan.tree.chain:
            yield (
                f"draft={self.brief} lengthens chains, and tree={plan.tree.brief} has branches: "
                f"leave one of the two out"
            )


Phrase: TypeAlias = tuple[int, ...]


class Pool(Lore):
    """For each token the last few phrases that followed it, the latest last.

    >>> pool = Pool(PhrasesDraft(tokens=2, pool=2))
    >>> pool.read([1, 2, 3, 1, 4, 5, 1, 2, 3])
    >>> pool.after(1)
    [(2, 3), (4, 5)]
    """

    def __init__(self, record: PhrasesDraft) -> None:
        self.size, self.most = record.tokens, record.pool
        self.phrases: dict[int, dict[Phrase, None]] = {}

    def add(self, token: int, phrase: Phrase) -> None:
        """A phrase followed a token; of that token's the one not met for longest may go."""
        known = self.phrases.setdefault(token, {})
        known.pop(phrase, None)
        known[phrase] = None
        if len(known) > self.most:
            del known[next(iter(known))]

    def correct(self, token: int, phrase: Phrase, said: Phrase) -> None:
        """What was taken for a phrase is another one."""
        known = self.phrases.get(token, {})
        if phrase in known and phrase != said:
            del known[phrase]
            self.add(token, said)

    def read(self, text: Sequence[int]) -> None:
        """All phrases of a text."""
        for start in range(len(text) - self.size):
            self.add(text[start], tuple(text[start + 1 : start + 1 + self.size]))

    def after(self, token: int) -> list[Phrase]:
        """The phrases that followed a token, the latest first."""
        return list(self.phrases.get(token, ()))[::-1]

    def tensors(self) -> Memo:
        """tokens: i32[N]. phrases: i32[N,L], -1 behind shorter ones; of a token the oldest
        first."""
        rows = [(token, phrase) for token, known in self.phrases.items() for phrase in known]
        padded = [phrase + (-1,) * (self.size - len(phrase)) for _, phrase in rows]
        return {
            "tokens": torch.tensor([token for token, _ in rows], dtype=torch.int32),
            "phrases": torch.tensor(padded, dtype=torch.int32).reshape(-1, self.size),
        }

    def take(self, memo: Memo, vocabulary: int) -> None:
        tokens, phrases = _checked(memo, self.size, vocabulary)
        self.phrases = {}
        for token, phrase in zip(tokens, phrases, strict=True):
            self.add(token, tuple(t for t in phrase if t >= 0))


def _checked(memo: Memo, size: int, vocabulary: int) -> tuple[list[int], list[list[int]]]:
    """Errors: `InputError` for tensors of a file that are no pool's."""
    if memo.keys() != {"tokens", "phrases"}:
        raise InputError(f"expected tokens and phrases, got {', '.join(sorted(memo))}")
    tokens, phrases = memo["tokens"], memo["phrases"]
    shaped = tokens.dim() == 1 and phrases.shape == (len(tokens), size)
    if not shaped or (tokens.dtype, phrases.dtype) != (torch.int32, torch.int32):
        raise InputError(f"expected tokens i32[N] and phrases i32[N,{size}]")
    if not len(tokens):
        return [], []
    padded = phrases < 0
    gaps = padded[:, :-1] & ~padded[:, 1:]
    if bool(padded[:, 0].any()) or bool(gaps.any()) or int(phrases.min()) < -1:
        raise InputError("phrases with gaps in them")
    if int(tokens.min()) < 0 or max(int(tokens.max()), int(phrases.max())) >= vocabulary:
        raise InputError(f"token ids outside 0..{vocabulary - 1}")
    return tokens.tolist(), phrases.tolist()


@DRAFTERS.register(PhrasesDraft)
class PhrasesDrafter(Drafter):
    """One pool for all texts. See the module docstring."""

    record: PhrasesDraft
    wants = ("argmax",)
    lore = Pool

    def __init__(self, record: PhrasesDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.pool: Pool = lore_of(self.executable, PhrasesDrafter, record)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for prompt in self.readable(prompts):
            self.pool.read(prompt)
        self.ends = [list(prompt[-self.record.tokens - 1 :]) for prompt in self.known(prompts)]

    def observe(self, taken: VerifiedStep) -> None:
        said = integers(taken.outputs, "argmax")
        for index, (draft, tokens) in enumerate(zip(taken.drafts, taken.tokens, strict=True)):
            if not tokens:
                continue
            end = self.ends[index]
            if draft.tokens:
                self._learn(draft, end[-1] if end else None, said[index], taken.paths[index])
            size = self.record.tokens
            self.pool.read([*end[-size:], *tokens])
            self.ends[index] = [*end, *tokens][-size - 1 :]

    def _learn(
        self, draft: Draft, last: int | None, said: Sequence[int], path: Sequence[int]
    ) -> None:
        """What the target said along a draft. said: after the root and after each node."""
        below = {
            parent: {draft.tokens[node]: node for node in nodes}
            for parent, nodes in draft.children().items()
        }
        for node in (-1, *range(len(draft.tokens))):
            key = last if node < 0 else draft.tokens[node]
            if key is None:
                continue
            if node in below:
                self._correct(key, node, below, said)
            if node >= 0 and node not in path:
                phrase = self._agreed(node, below, said)
                if len(phrase) > 1:
                    self.pool.add(key, phrase)

    def _correct(
        self, key: int, node: int, below: Mapping[int, Mapping[int, int]], said: Sequence[int]
    ) -> None:
        """Phrases that were drafted whole behind a node become what the target said along them."""
        for phrase in self.pool.after(key):
            at, heard = node, list[int]()
            for token in phrase:
                heard.append(said[at + 1])
                down = below.get(at, {}).get(token)
                if down is None:
                    break
                at = down
            else:
                self.pool.correct(key, phrase, tuple(heard))

    def _agreed(
        self, node: int, below: Mapping[int, Mapping[int, int]], said: Sequence[int]
    ) -> Phrase:
        """What the target said after a node, and on, as long as the draft has it."""
        phrase: list[int] = []
        at: int | None = node
        while at is not None and len(phrase) < self.record.tokens:
            phrase.append(said[at + 1])
            at = below.get(at, {}).get(phrase[-1])
        return tuple(phrase)

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        return self.branches([()] * len(rooms), rooms)

    def branches(self, tokens: Sequence[Sequence[int]], rooms: Sequence[int]) -> list[Draft]:
        found = []
        for end, extra, room in zip(self.ends, tokens, rooms, strict=True):
            last = [*end, *extra][-1:]
            trie = Trie()
            for phrase in self.pool.after(last[0])[: self.record.phrases] if last else ():
                trie.path(-1, phrase[: max(room, 0)])
            found.append(trie.draft())
        return found

    def ahead(self, tokens: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[int]]:
        """The latest phrase, and the latest one after its last token."""
        found = []
        for end, extra, count in zip(self.ends, tokens, counts, strict=True):
            chain = [*end, *extra][-1:]
            while chain and len(chain) <= count:
                phrases = self.pool.after(chain[-1])
                if not phrases:
                    break
                chain += phrases[0]
            found.append(chain[1 : 1 + count])
        return found


@DRAFTERS.register(LengthenedDraft)
class LengthenedDrafter(CombiningDrafter):
    """The first part's chains with branches of the second one's behind their last tokens."""

    record: LengthenedDraft

    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        chains = self.parts[0].propose(rooms)
        left = [room - len(chain.tokens) for chain, room in zip(chains, rooms, strict=True)]
        tails = self.parts[1].branches([chain.tokens for chain in chains], left)
        return [lengthened(chain, tail) for chain, tail in zip(chains, tails, strict=True)]


def lengthened(chain: Draft, tail: Draft) -> Draft:
    """A chain with the branches of `tail` behind its last token. Of tokens that were not sampled
    the draft was sure, each by itself.

    >>> lengthened(Draft([1, 2]), Draft([7, 8, 9], None, (-1, 0, -1))).parents
    (-1, 0, 1, 2, 1)
    """
    if not tail.tokens or not chain.tokens:
        return chain if chain.tokens else tail
    count = len(chain.tokens)
    above = tail.parents or range(-1, len(tail.tokens) - 1)
    parents = (*range(-1, count - 1), *(parent + count for parent in above))
    tokens = [*chain.tokens, *tail.tokens]
    if chain.probs is None:
        return Draft(tokens, None, parents)
    sure = torch.zeros(len(tail.tokens), chain.probs.shape[-1])
    sure[torch.arange(len(tail.tokens)), torch.tensor(tail.tokens)] = 1.0
    return Draft(tokens, torch.cat([chain.probs, sure]), parents, True)
