"""From logits to the scores and probabilities that a token is chosen by.

Each function works on rows [R,V] at once; their order and meaning are transformers': repetition
penalty, no end before `min_new_tokens`, then (when sampling) temperature, top-k, top-p, min-p.
After a top-k only the k candidates are carried on, so that what follows does not cost a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...ir import InputError, ModelInfo
from ..asking.options import GenerationOptions
from ..asking.text import Text
from ..feeding.draft import Draft

NOTHING = float("-inf")
Array: TypeAlias = npt.NDArray[Any]


def penalize_repetition(scores: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Seen tokens' scores divided by `penalty` where positive, multiplied where negative.

    scores f32[R,V]; seen bool[R,V]. Source: Keskar et al., "CTRL" (2019).
    """
    penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, penalized, scores)


def keep_top_k(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Scores [R,V] with all below the row's `count`-th largest at -inf; ties with it stay.

    Source: Fan et al., "Hierarchical Neural Story Generation" (2018).
    """
    if count >= scores.shape[-1]:
        return scores
    bound = scores.topk(count).values[:, -1:]
    return scores.masked_fill(scores < bound, NOTHING)


def keep_top_p(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """Scores [R,V] with the least likely tokens, together at most 1 - mass, at -inf.

    The most likely token always stays. Source: Holtzman et al., "The Curious Case of Neural Text
    Degeneration" (2020).
    """
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1)
    dropped = below <= 1 - mass
    dropped[:, -1] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), NOTHING)


def keep_min_p(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Scores [R,V] with tokens less likely than `share` of the row's likeliest at -inf.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling" (2024).
    """
    chances = scores.softmax(-1)
    return scores.masked_fill(chances < share * chances.amax(-1, keepdim=True), NOTHING)


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

    def at(self, rows: Sequence[int]) -> Chances:
        """Some rows, in order and no row twice: a copy, unless they are all of them."""
        if len(rows) == len(self.probs):
            return self
        return Chances(self.probs[rows], None if self.ids is None else self.ids[rows])

    def subtract(self, row: int, token: int, given: Array | None) -> None:
        """Row <- norm(max(p - q, 0)) in place, q = `given` [V] being what `token` was drawn from.

        Without it, q is the token itself. A row of which nothing is left stays: p = q up to
        rounding.
        """
        if given is None:
            rest = self.probs[row].copy()
            rest[token if self.ids is None else self.ids[row] == token] = 0
        else:
            rest = np.maximum(self.probs[row] - self.among(row, given), 0)
        self.replace(row, rest)

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
        """One token a row, by inverting the cumulative distribution in float64."""
        reached = self.probs.cumsum(-1, dtype=np.float64)
        points = torch.rand(len(reached), dtype=torch.float64, generator=generator).tolist()
        tokens = []
        for row, (sums, point) in enumerate(zip(reached, points, strict=True)):
            # The first token past the point: one without probability never is.
            index = min(int(sums.searchsorted(point * sums[-1], side="right")), len(sums) - 1)
            tokens.append(index if self.ids is None else int(self.ids[row, index]))
        return tokens


def warp(scores: torch.Tensor, options: GenerationOptions) -> Chances:
    """What to sample from under temperature and filters; no two rows of it share memory.

    Errors: `InputError` for NaN scores [R,V].
    """
    scores, ids = _warmed(scores, options)
    if options.top_p < 1.0:
        scores = keep_top_p(scores, options.top_p)
    if options.min_p > 0.0:
        scores = keep_min_p(scores, options.min_p)
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
    i + 1 that after draft node i."""

    outputs: Mapping[str, torch.Tensor]
    texts: Sequence[Text]
    drafts: Sequence[Draft]


class Scorer:
    """Turns the logits of a step's verified tokens into scores, under the user's options.

    A row belongs to a sequence and the draft node after which it speaks, -1 for the root; what the
    repetition penalty counts as seen grows along the node's path.
    """

    def __init__(self, options: GenerationOptions, info: ModelInfo, batch: int) -> None:
        self.options = options
        self.eos = list(options.eos(info))
        self.seen = torch.zeros(batch, info.vocab_size, dtype=torch.bool)
        self.counted = [0] * batch

    def rows(self, step: StepToVerify) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """Scores f32[R,V] of a step's ``logits``, whose memory they may share, and each row's
        (sequence, node). Finished sequences give no rows."""
        outputs, texts, drafts = step
        owners = [
            (index, node)
            for index, text in enumerate(texts)
            if not text.done
            for node in range(-1, len(drafts[index].tokens))
        ]
        logits = outputs["logits"]
        if len(texts) == 1:
            scores = logits[0, : len(owners)].to("cpu", torch.float32)
        else:
            columns = [node + 1 for _, node in owners]
            scores = logits[[index for index, _ in owners], columns].to("cpu", torch.float32)
        if self.options.repetition_penalty != 1.0:
            seen = self._seen(step, owners)
            scores = penalize_repetition(scores, seen, self.options.repetition_penalty)
        if self.options.min_new_tokens and self.eos:
            scores = self._forbid(self.eos, self.options.min_new_tokens, scores, step, owners)
        if first := list(self.options.begin_suppress_tokens):
            scores = self._forbid(first, 1, scores, step, owners)
        if never := list(self.options.suppress_tokens):
            scores = scores.clone()
            scores[:, torch.tensor(never)] = NOTHING
        return scores, owners

    def warp(self, scores: torch.Tensor) -> Chances:
        """What to sample from. Errors: `InputError` for NaN scores [R,V]."""
        return warp(scores, self.options)

    def _seen(self, step: StepToVerify, owners: list[tuple[int, int]]) -> torch.Tensor:
        for index, text in enumerate(step.texts):
            self.seen[index, text.tokens[self.counted[index] :]] = True
            self.counted[index] = len(text.tokens)
        seen = self.seen[[index for index, _ in owners]]
        for row, (index, node) in enumerate(owners):
            draft = step.drafts[index]
            seen[row, [draft.tokens[before] for before in draft.path(node)]] = True
        return seen

    def _forbid(
        self,
        tokens: list[int],
        least: int,
        scores: torch.Tensor,
        step: StepToVerify,
        owners: list[tuple[int, int]],
    ) -> torch.Tensor:
        """Scores under which none of these is among a text's first `least` new tokens."""
        early = [
            row
            for row, (index, node) in enumerate(owners)
            if step.texts[index].generated + step.drafts[index].depth(node) < least
        ]
        if not early:
            return scores
        scores = scores.clone()
        scores[torch.tensor(early)[:, None], torch.tensor(tokens)] = NOTHING
        return scores


def bad_logits() -> InputError:
    """The error for logits that no token can be chosen by."""
    return InputError(
        "the model's logits hold NaN or are all -inf: expected finite numbers; check the weights, "
        "or use a wider dtype (float16 overflows in some models: try bfloat16 or float32)"
    )


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
