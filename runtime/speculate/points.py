"""Random numbers by place: token t of text b is drawn with number [t, b], whatever was drafted."""

from __future__ import annotations

import torch


class Points:
    """Numbers in 0..1 for the tokens of `count` texts.

    A text is then the same with one seed whether, and how long, drafts are: in steps of one token
    as in steps of many. A row for all texts is drawn when the first of them gets there.
    """

    def __init__(self, count: int, generator: torch.Generator | None) -> None:
        self.count, self.generator = count, generator
        self.rows: list[list[float]] = []

    def at(self, text: int, place: int) -> float:
        """The number for a text's new token number `place`, from 0."""
        while len(self.rows) <= place:
            drawn = torch.rand(self.count, dtype=torch.float64, generator=self.generator)
            self.rows.append(drawn.tolist())
        return self.rows[place][text]
