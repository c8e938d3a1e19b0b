"""How often tokens follow others in a text: n-gram models, counted when they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

END = -1
"""Token that ends a document of a text: no n-gram goes past it."""

Tokens: TypeAlias = npt.NDArray[np.int32]


class Ngrams:
    """The n-gram models of a text, of up to `longest` tokens before the one that follows.

    tokens: ids, `END` behind each document. All places of the text are sorted by the `longest` + 1
    tokens from there on, so that what follows a context lies together: 4 bytes a token and column.

    >>> Ngrams([5, 1, 2, 5, 1, 3, END, 5, 1], 2).following([7, 5, 1], 2, [2, 3, 4]).tolist()
    [0.5, 0.5, 0.0]
    """

    def __init__(self, tokens: Sequence[int] | npt.NDArray[Any], longest: int) -> None:
        text = np.asarray(tokens, dtype=np.int32)
        count = len(text)
        padded = np.concatenate([text, np.full(longest + 1, END, np.int32)])
        ahead = [padded[size : size + count] for size in range(longest + 1)]
        order = np.lexsort(ahead[::-1])
        self.columns: list[Tokens] = [column[order] for column in ahead]

    def following(
        self, text: Sequence[int], size: int, candidates: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """The part of each of `candidates` among what follows the last `size` tokens of `text`;
        zeros where nothing does, or the text is shorter."""
        found = np.zeros(len(candidates))
        if size > len(text):
            return found
        low, high = 0, len(self.columns[0])
        for column, token in zip(self.columns, text[len(text) - size :], strict=False):
            part = column[low:high]
            low, high = (low + int(part.searchsorted(token, side)) for side in ("left", "right"))
            if low == high:
                return found
        part = self.columns[size][low:high]
        ended = int(part.searchsorted(END, "right"))  # documents end there: nothing follows
        if ended == len(part):
            return found
        wanted = np.asarray(candidates, dtype=np.int32)
        counts = part.searchsorted(wanted, "right") - part.searchsorted(wanted, "left")
        return counts / (len(part) - ended)

    def mixture(
        self, text: Sequence[int], weights: Sequence[float], candidates: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        """Probabilities of candidates behind a text: weights[i] times that of the model that looks
        at i tokens, summed."""
        parts = [
            weight * self.following(text, size, candidates)
            for size, weight in enumerate(weights)
            if weight
        ]
        return np.sum(parts, axis=0) if parts else np.zeros(len(candidates))
