"""Noise by place: which token a text gets there follows from a seed and the target's distribution.

Place t of text b has a random number for every token. The token of a distribution p is the winner
of a race in which token x arrives at time noise[x] / p(x): it is x with probability p(x), because
the minimum of exponential times is their first arrival (the Gumbel-max trick, with logarithms
taken). A drafter that lets its own q race with the same noise often has the same winner: with
probability (1 - d) / (1 + d) at least, d being the total variation distance of p and q. No way to
draw that knows nothing of the other distribution does better for all p and q; rejection, which
knows both, has 1 - d. The text is then the same for one seed whatever was drafted, and however
long drafts are. Source: Daliri, Musco, Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ..asking.text import Text
from .level import Ids
from .sampling import Array, Chances

Times = npt.NDArray[np.float64]
_Words = npt.NDArray[np.uint64]

KEPT = 1 << 21
"""Times that are kept: a step drafts and verifies the same places."""

_GAMMA, _ROUNDS = 0x9E3779B97F4A7C15, ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORD = (1 << 64) - 1


class Noise:
    """Exponential times by text, place and token. generator: gives one number, at the first call,
    from which all else follows; None: torch's global one."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator
        self.seed: int | None = None
        self.kept: dict[tuple[int, int, int], Times] = {}

    def at(self, text: int, place: int, count: int, ids: Array | None = None) -> Times:
        """f64[K] of the tokens ids i64[K] of a vocabulary of `count`, None: f64[count] of all, for
        a text's new token number `place`, from 0."""
        if ids is not None:
            return _times(self._start(text, place), ids.astype(np.uint64) * np.uint64(_GAMMA))
        key = (text, place, count)
        if key not in self.kept:
            if len(self.kept) * count >= KEPT:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = _times(self._start(text, place), _streams(count))
        return self.kept[key]

    def winner(self, chances: Chances, row: int, text: int, place: int) -> int:
        """The token of a row of distributions at a place."""
        probs, ids = chances.probs[row], None if chances.ids is None else chances.ids[row]
        index = int((probs / self.at(text, place, len(probs), ids)).argmax())
        return index if ids is None else int(ids[index])

    def _start(self, text: int, place: int) -> int:
        """Where the stream of numbers begins."""
        if self.seed is None:
            drawn = torch.randint(0, 1 << 62, (), dtype=torch.int64, generator=self.generator)
            self.seed = int(drawn)
        return _mixed(_mixed(self.seed + text * _GAMMA) + place * _GAMMA)


class DraftNoise:
    """The noise of the places that a draft is made for. texts: those that are drafted for."""

    def __init__(self, noise: Noise, texts: Sequence[Text]) -> None:
        self.noise, self.texts = noise, texts

    def best(self, chances: Chances, rows: Sequence[int], depth: int, count: int) -> Ids:
        """The first `count` arrivals of each text of `rows`, i64[R,count], the winner first; -1:
        none left. chances: a row each, of its token number `depth`, from 1, after the text."""
        found = np.full((len(rows), count), -1, dtype=np.int64)
        for at, text in enumerate(rows):
            place = self.texts[text].generated + depth - 1
            probs, ids = chances.probs[at], None if chances.ids is None else chances.ids[at]
            race = probs / self.noise.at(text, place, len(probs), ids)
            if count == 1:
                order = np.array([race.argmax()])
            else:
                size = min(count, len(race))
                order = np.argpartition(-race, size - 1)[:size]
                order = order[np.argsort(-race[order], kind="stable")]
            order = order[race[order] > 0]
            found[at, : len(order)] = order if ids is None else ids[order]
        return found


@lru_cache(maxsize=4)
def _streams(count: int) -> _Words:
    """How far each token's number is from the stream's beginning, u64[count]."""
    return np.arange(count, dtype=np.uint64) * np.uint64(_GAMMA)


def _times(start: int, streams: _Words) -> Times:
    """Exponential times, SplitMix64's numbers at these distances from `start` turned into uniform
    ones above 0 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    words = streams + np.uint64(start)
    for shift, factor in _ROUNDS:
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    uniform = (words >> np.uint64(11)).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-53
    # 1 - 2^-54 is 1 in float64: a time of 0, by which 0 / 0 would be no winner's.
    times: Times = np.maximum(-np.log(uniform), 2.0**-54)
    return times


def _mixed(word: int) -> int:
    """SplitMix64's output of a state, in integers of any size.

    >>> hex(_mixed(0x9E3779B97F4A7C15))
    '0xe220a8397b1dcdaf'
    """
    word &= _WORD
    for shift, factor in _ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> 31)
