"""SpecTr: judge siblings that were sampled independently of each other together.

Source: Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....ir.plan import SpecTr
from ...feeding.draft import Draft
from ..sampling import Array, Chances
from .base import GREEDY, SAMPLING, VERIFIERS
from .greedy import GreedyVerifier
from .rejection import RejectionVerifier

VERIFIERS.register(SpecTr, GREEDY)(GreedyVerifier)


@VERIFIERS.register(SpecTr, SAMPLING)
class SpecTrVerifier(RejectionVerifier):
    """k-sequential selection: of k siblings the first that passes with min(1, p / (rho q)).

    Compared with judging them one by one against what is left of p, every sibling has the same
    chance, and rho in 1..k is as small as losslessness allows. If none passes, a token is sampled
    from what is left (see `selection`). An only child has rho = 1: that is rejection sampling.
    Siblings of any other kind are verified as by `Lossless`.
    """

    def _first_taken(
        self,
        chances: Chances,
        row: int,
        draft: Draft,
        siblings: Sequence[int],
        draws: Sequence[float],
    ) -> int | None:
        if draft.probs is None or not draft.independent or len(siblings) < 2:
            return super()._first_taken(chances, row, draft, siblings, draws)
        given = draft.probs[siblings[0]].numpy()
        wanted = chances.probs[row]
        rho, rest = selection(wanted, chances.among(row, given), len(siblings))
        for node in siblings:
            token = draft.tokens[node]
            if draws[node] * rho * float(given[token]) < chances.of([row], [token])[0]:
                return node
        chances.replace(row, rest)
        return None


def selection(wanted: Array, given: Array, count: int) -> tuple[float, Array]:
    """rho for `count` siblings sampled from q = `given` [K], and what is left of p = `wanted` [K].

    A sibling passes with probability b(rho) = sum min(q, p / rho), one of all of them with
    s(rho) = 1 - (1 - b)^count, and then token x comes up with s / b * min(q, p / rho). That must
    not exceed p(x), so s <= rho b: true at rho = count, and from some smallest rho on, because rho
    b rises and s falls. What is left is p - s / b * min(q, p / rho), not scaled.

    >>> rho, rest = selection(np.array([0.5, 0.5]), np.array([1.0, 0.0]), 2)
    >>> round(rho, 3), rest.round(3).tolist()
    (1.707, [0.0, 0.5])
    """
    wanted, given = wanted.astype(np.float64), given.astype(np.float64)
    low, high = 1.0, float(count)
    for _ in range(20):
        middle = (low + high) / 2
        passing = np.minimum(given, wanted / middle).sum()
        if 1 - (1 - passing) ** count > middle * passing:
            low = middle
        else:
            high = middle
    shared = np.minimum(given, wanted / high)
    passing = shared.sum()
    if passing <= 0:
        return high, wanted
    some = 1 - (1 - passing) ** count
    return high, np.maximum(wanted - some / passing * shared, 0)
