"""Noise that rides along with every step, which a target tuned for it reads as the text to come.

Source: Wang et al., "Make Some Noise: Unlocking Language Model Parallel Inference Capability
through Noisy Training" (2024): TR-Jacobi decoding, that is, Jacobi iteration over a tree of each
place's best tokens, with what followed an earlier occurrence of the text's end as further
candidates.

A node of the draft is followed by the trajectory: the best guesses so far for the places behind it
and, where there are none yet, tokens of the text at random, the noise. What the target says after
the k-th of them is its next guess for the place k + 1 places after the node (Jacobi). The guesses
behind the node where verification ends make the next draft. Nodes of the draft that are of the
trajectory serve as such; the others ride along and are never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ....ir.plan import record
from ....ir.plan.bounds import Levels, Part, Share
from ....runtime.feeding.draft import Draft, VerifiedStep
from ....runtime.speculate.level import Ids
from ....runtime.speculate.proposers.base import PROPOSERS
from ....runtime.speculate.setting import Setting
from ..ppd import UNLIKELY, PromptProposer, RidingDraft
from ..suffix import SuffixIndex

LONGEST = 8
"""Tokens of a repeated suffix at most."""


@record
@dataclass(frozen=True)
class NoiseDraft(RidingDraft):
    """Guesses and noise behind the nodes of a draft, which the target replaces by better guesses
    (Make Some Noise, TR-Jacobi).

    prompts: tokens behind a node. retrieved: the probability that is credited to each token of what
    followed the longest earlier occurrence of the text's end; 0: none are looked for. shortest: of
    such ends, in tokens. noisy: in training, the share of the text's tokens that noise replaces.
    """

    retrieved: Share = 0.5
    shortest: Levels = 2
    noisy: Part = 0.1
    kind: ClassVar[str] = "noise"


@PROPOSERS.register(NoiseDraft)
class NoiseProposer(PromptProposer):
    """best: i64[B,M], the target's guesses for the M places after the text's last token; -1: none
    yet. plans: i64[B,2M], what stands at each place behind the last token in the current step."""

    record: NoiseDraft

    def __init__(self, record: NoiseDraft, setting: Setting) -> None:
        super().__init__(record, setting)
        self.random, self.setting = np.random.default_rng(0), setting

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        super().begin(prompts)
        self.best: Ids = np.full((len(prompts), self.many), -1, dtype=np.int64)
        self.plans: Ids = np.zeros((len(prompts), 2 * self.many), dtype=np.int64)
        unknown = [text.unknown for text in self.setting.texts] or [0] * len(prompts)
        self.texts = [SuffixIndex(LONGEST) for _ in prompts]
        for text, prompt, count in zip(self.texts, prompts, unknown, strict=True):
            text.extend(list(prompt[count:]))
        for index in range(len(prompts)):
            self._retrieve(index)

    def ride(self, drafts: list[Draft], rooms: Sequence[int]) -> list[Draft]:
        for index, text in enumerate(self.texts):
            known = text.tokens or [0]
            places = self.random.integers(len(known), size=2 * self.many)
            self.plans[index] = [known[place] for place in places]
            own = self.best[index] >= 0
            self.plans[index, : self.many][own] = self.best[index][own]
        return super().ride(drafts, rooms)

    def _ridden(self, draft: Draft, index: int) -> Draft:
        size, depths = len(draft.tokens), draft.shape.depths
        behind, riders, follows = _children(draft), list[int](), list[int]()
        for node in self._ends(draft, index)[: self.record.after]:
            at, depth = node, depths[node] if node >= 0 else 0
            for token in self.plans[index, depth : depth + self.many].tolist():
                if (at, token) not in behind:
                    behind[at, token] = size + len(riders)
                    riders.append(token)
                    follows.append(at)
                at = behind[at, token]
        return draft.riding(riders, follows)

    def observe(self, taken: VerifiedStep) -> None:
        for index, tokens in enumerate(taken.tokens):
            if not tokens:
                continue
            self.texts[index].extend(list(tokens))
            draft, path = taken.drafts[index], taken.paths[index]
            columns = self._columns(draft, path[-1] if path else -1, index)
            self.tokens[index], self.scores[index] = -1, UNLIKELY
            self.best[index] = -1
            known = slice(0, len(columns))
            if columns:
                said = taken.outputs["draft_tokens"][index][columns]
                self.tokens[index, known] = said.cpu().numpy()
                scores = taken.outputs["draft_scores"][index][columns]
                self.scores[index, known] = scores.float().cpu().numpy()
                self.best[index, known] = self.tokens[index, known, 0]
            self._retrieve(index)
            if self.logits is not None and columns:
                logits = taken.outputs["logits"][index][columns]
                self.logits[index, known] = logits.float().cpu().numpy()

    def _columns(self, draft: Draft, node: int, index: int) -> list[int]:
        """The step's columns of the trajectory behind a node, as far as it was fed."""
        if node >= len(draft.tokens) or not draft.riders:
            return []
        behind, depth, at = _children(draft), draft.depth(node), node
        columns: list[int] = []
        for token in self.plans[index, depth : depth + self.many].tolist():
            if (at, token) not in behind:
                break
            at = behind[at, token]
            columns.append(1 + at)
        return columns

    def _retrieve(self, index: int) -> None:
        """Make what followed the text's end earlier a candidate of each place."""
        record, text = self.record, self.texts[index]
        if self.logits is not None or not record.retrieved or text.length < record.shortest:
            return
        score = float(np.log(record.retrieved))
        for place, token in enumerate(text.tokens[text.end : text.end + self.many]):
            tokens, scores = self.tokens[index, place], self.scores[index, place]
            found = np.flatnonzero(tokens == token)
            at = int(found[0]) if len(found) else len(tokens) - 1
            tokens[at], scores[at] = token, max(score, scores[at] if len(found) else UNLIKELY)
            order = np.argsort(-scores, kind="stable")
            tokens[:], scores[:] = tokens[order], scores[order]


def _children(draft: Draft) -> dict[tuple[int, int], int]:
    """The column less one of each token, by whom it continues and what it is."""
    above = draft.parents or range(-1, len(draft.tokens) - 1)
    whom = [*above, *draft.follows]
    made: dict[tuple[int, int], int] = {}
    for column, (parent, token) in enumerate(zip(whom, draft.fed, strict=True)):
        made.setdefault((parent, int(token)), column)
    return made
