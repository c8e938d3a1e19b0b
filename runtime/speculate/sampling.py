"""From logits to the scores and probabilities that a token is chosen by.

Everything works on rows [R,V] at once; order and meaning are transformers': the processors of a
text (`asking/processors.py`), then (when sampling) temperature, top-k, top-p, min-p. After a top-k
only the k candidates are carried on, so that what follows does not cost a vocabulary.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..asking.checks import bad_logits
from ..asking.filters import keep_min_p, keep_top_k, keep_top_p
from ..asking.guides import guided
from ..asking.options import GenerationOptions
from ..asking.text import Text
from ..feeding.draft import Draft

Array: TypeAlias = npt.NDArray[Any]


class Chances(NamedTuple):
    """Distributions to sample from: probs f32[R,K] of the tokens ids i64[R,K].

    ids None: of every token, K = V. Rows add up to 1. Arrays and not tensors: on rows of this size
    a tensor op costs more in dispatch than in arithmetic.
    """

    probs: Array
    ids: Array | None

    def of(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Probability of `tokens[i]` in row `rows[i]`."""
        if self.ids is None:
            return self.probs[rows, tokens].tolist()  # type: ignore[no-any-return]
        hits = self.ids[rows] == np.array(tokens)[:, None]
        return (self.probs[rows] * hits).sum(-1).tolist()  # type: ignore[no-any-return]

    def subtract(self, row: int, given: Array) -> None:
        """Row <- norm(max(p - q, 0)) in place, q = `given` [V]. A row of which nothing is left
        stays: p = q up to rounding."""
        self.replace(row, np.maximum(self.probs[row] - self.among(row, given), 0))

    def among(self, row: int, given: Array) -> Array:
        """What `given` [V] says of a row's candidates [K]."""
        return given if self.ids is None else given[self.ids[row]]

    def replace(self, row: int, rest: Array) -> None:
        """Row <- `rest` [K], scaled to add up to 1; if nothing is left the row stays as it is."""
        probs = self.probs[row]
        total = rest.sum()
        if total > 0:
            np.divide(rest, total, out=probs)

    def draw(self, generator: torch.Generator | None) -> list[int]:
        """One token a row."""
        points = torch.rand(len(self.probs), dtype=torch.float64, generator=generator).tolist()
        return [self.token(row, point) for row, point in enumerate(points)]

    def token(self, row: int, point: float) -> int:
        """The token of a row at `point` in 0..1, by inverting the cumulative distribution in
        float64."""
        sums = self.probs[row].cumsum(dtype=np.float64)
        # The first token past the point: one without probability never is.
        index = min(int(sums.searchsorted(point * sums[-1], side="right")), len(sums) - 1)
        return index if self.ids is None else int(self.ids[row, index])


def warp(scores: torch.Tensor, options: GenerationOptions) -> Chances:
    """What to sample from under temperature and filters; no two rows of it share memory.

    Errors: `InputError` for NaN scores [R,V].
    """
    scores, ids = _warmed(scores, options)
    if options.top_p < 1.0:
        scores = keep_top_p(scores, options.top_p)
    if options.min_p > 0.0:
        scores = keep_min_p(scores, options.min_p)
    return _chances(scores, ids)


def _chances(scores: torch.Tensor, ids: torch.Tensor | None) -> Chances:
    probs = scores.softmax(-1).numpy()
    # One NaN or +inf score makes a whole row NaN, so one column tells.
    if any(map(math.isnan, probs[:, 0].tolist())):
        raise bad_logits()
    return Chances(probs, None if ids is None else ids.numpy())


def whole(chances: Chances, vocabulary: int) -> torch.Tensor:
    """Probabilities f32[R,V] of every token."""
    probs = torch.from_numpy(chances.probs)
    if chances.ids is None:
        return probs
    spread = torch.zeros(len(probs), vocabulary)
    return spread.scatter_(1, torch.from_numpy(chances.ids), probs)


def _warmed(
    scores: torch.Tensor, options: GenerationOptions
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Temperature and top-k: the candidates' scores and ids, best first, or all of them."""
    count, temperature = options.top_k, options.temperature
    if count and count < scores.shape[-1]:
        best_scores, ids = scores.topk(count + 1)
        best_scores = best_scores if temperature == 1.0 else best_scores / temperature
        # A tie with the last candidate belongs to the candidates: then there are more than k.
        lowest = best_scores[:, -2:].tolist()
        if all(beyond < last for last, beyond in lowest):
            return best_scores[:, :-1], ids[:, :-1]
    scores = scores if temperature == 1.0 else scores / temperature
    return (keep_top_k(scores, count) if count else scores), None


class StepToVerify(NamedTuple):
    """A step to be verified. outputs: ``logits`` [B,S,V] with S > the largest draft, or ``argmax``
    i64[B,S]: column 0 of a sequence is the target's view after its last committed token, column
    i + 1 that after draft node i. Behind the rows of the texts are those of their guides, if they
    have any. columns: of each sequence's last committed token in values a fed token, such as
    states; (): the first."""

    outputs: Mapping[str, torch.Tensor]
    texts: Sequence[Text]
    drafts: Sequence[Draft]
    columns: Sequence[int] = ()


class Scorer:
    """Turns the logits of a step's verified tokens into scores, under the user's options.

    A row belongs to a sequence and the draft node after which it speaks, -1 for the root; its text
    is the sequence's with the node's path. records: whether the call wants scores or logits.
    hopeless: sequences that will not be kept, whatever comes.
    best_only: whether nothing but the best token after each row is ever kept. dead: (sequence,
    node) of the last step that must not be kept, whatever a verifier thinks of it.
    """

    best_only = False

    def __init__(self, options: GenerationOptions) -> None:
        self.options = options
        self.records = options.records
        self.ids: dict[int, torch.Tensor] = {}
        self.dead: frozenset[tuple[int, int]] = frozenset()
        self.hopeless: frozenset[int] = frozenset()

    def rows(self, step: StepToVerify) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Scores f32[R,V] of a step's ``logits``, whose memory they may share, and each row's
        (sequence, node). Finished sequences give no rows. The rows of nodes that cannot be kept
        are logits as they are: nothing looks at them."""
        outputs, texts, drafts, _ = step
        owners = [
            (index, node)
            for index, text in enumerate(texts)
            if not text.done
            for node in range(-1, len(drafts[index].tokens))
        ]
        logits = outputs["logits"]
        scores = rows_of(logits, len(texts), owners)
        raw, scores = scores, self.scaled(scores)
        if self.options.guided:
            away = [index + len(texts) for index, _ in owners]
            guides = logits[away, [node + 1 for _, node in owners]].to("cpu", torch.float32)
            asked = self.options
            how = asked.guidance_plausible, asked.guidance_uncertain
            scores = guided(scores, guides, asked.guidance_scale or 0.0, *how)
        if any(text.processors for text in texts):
            scores = self._processed(scores.clone(), step, owners)
        if self.records:
            self.last = raw, scores, {owner: row for row, owner in enumerate(owners)}
        return scores, owners

    def scaled(self, scores: torch.Tensor) -> torch.Tensor:
        """What processors are given for scores [R,V]: these."""
        return scores

    def rescore(self, scores: torch.Tensor) -> None:
        """Tokens of the last step are chosen by other scores f32[R,V] than `rows` gave."""
        if self.records:
            raw, _, places = self.last
            self.last = raw, scores, places

    def record(self, index: int, text: Text, nodes: Sequence[int]) -> None:
        """Keep what a sequence's text chose its tokens by: after these nodes of the last step."""
        logits, scores, rows = self.last
        for node in nodes:
            row = rows[index, node]
            if self.options.output_logits:
                text.logits.append(logits[row].clone())
            if self.options.output_scores:
                text.scores.append(scores[row].clone())

    def warp(self, scores: torch.Tensor) -> Chances:
        """What to sample from. Errors: `InputError` for NaN scores [R,V]."""
        return _chances(scores, None) if self.options.warps_whole else warp(scores, self.options)

    def _processed(
        self, scores: torch.Tensor, step: StepToVerify, owners: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Scores, changed in place, behind each row's processors.

        From the root down: what cannot be kept behind a parent's scores costs nothing, and what
        processors would make of a text with a token that they forbid may be an error.
        """
        place = {owner: row for row, owner in enumerate(owners)}
        levels: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, node in owners:
            levels[step.drafts[index].depth(node)].append((index, node))
        for _, level in sorted(levels.items()):
            groups: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
            for index, node in level:
                if self._possible(scores, step.drafts[index], index, node, place):
                    text = step.texts[index]
                    groups[id(text.processors), len(text.tokens)].append((index, node))
            for group in groups.values():
                ids = torch.stack([self._text(step, index, node) for index, node in group])
                rows = [place[owner] for owner in group]
                changed = scores[rows]
                for processor in step.texts[group[0][0]].processors:
                    changed = processor(ids, changed)
                scores[rows] = changed.to(scores.dtype)
        self.dead = frozenset(owner for owner in owners if owner not in place)
        return scores

    def _possible(
        self,
        scores: torch.Tensor,
        draft: Draft,
        index: int,
        node: int,
        place: dict[tuple[int, int], int],
    ) -> bool:
        """Whether a node may be kept; those that cannot are taken out of `place`."""
        if node < 0:
            if index in self.hopeless:
                del place[index, node]
            return index not in self.hopeless
        parent = node - 1 if draft.parents is None else draft.parents[node]
        row, token = place.get((index, parent)), draft.tokens[node]
        if row is not None and self.best_only:
            possible = int(scores[row].argmax()) == token
        else:
            possible = row is not None and float(scores[row, token]) > float("-inf")
        if not possible:
            del place[index, node]
        return possible

    def _text(self, step: StepToVerify, index: int, node: int) -> torch.Tensor:
        """A row's text, i64[L]."""
        tokens, held = step.texts[index].known, self.ids.get(index)
        if held is None or len(held) < len(tokens):
            new = torch.tensor(tokens[0 if held is None else len(held) :], dtype=torch.int64)
            held = self.ids[index] = new if held is None else torch.cat([held, new])
        draft = step.drafts[index]
        path = [draft.tokens[before] for before in draft.path(node)]
        return torch.cat([held, torch.tensor(path, dtype=torch.int64)]) if path else held


def rows_of(values: torch.Tensor, batch: int, owners: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The rows f32[R,V] of a step's values [B,S,V] behind the nodes of `Scorer.rows`, whose memory
    they may share. batch: texts of the step."""
    if batch == 1:
        return values[0, : len(owners)].to("cpu", torch.float32)
    columns = [node + 1 for _, node in owners]
    return values[[index for index, _ in owners], columns].to("cpu", torch.float32)


def agreed(draft: Sequence[int], chosen: Sequence[int], vocabulary: int) -> int:
    """Greedy acceptance of a chain: the tokens at its front that the target would choose, too.

    chosen: the target's choices after the last committed token and after each draft token, at least
    len(draft) + 1. The sequence gains ``chosen[: agreed + 1]``. In graphs `GraphBuilder.leading`
    counts the same. Errors: `InputError` if the last of these is no token: an argmax of nothing.

    >>> agreed([5, 6, 7], [5, 6, 8, 9], vocabulary=10)
    2
    """
    count = 0
    for token in draft:
        if token != chosen[count]:
            break
        count += 1
    if not 0 <= chosen[count] < vocabulary:
        raise bad_logits()
    return count


def best(scores: torch.Tensor) -> list[int]:
    """The best token of each row [R,V]; the first at a tie. Errors: `InputError` for NaN rows."""
    tokens = scores.argmax(-1)
    values = scores.gather(1, tokens[:, None])
    if bool((values.isnan() | values.isneginf()).any()):
        raise bad_logits()
    return tokens.tolist()
