"""What states hold of a text, where that is not one row for every row of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Held(ABC):
    """How many rows a class of states has, when others have one for every row of a text."""

    @abstractmethod
    def rows(self, rows: int) -> int:
        """Rows that may matter of a text of `rows` rows: the first ones of these states."""

    def rows_of(self, rows: int, tokens: int) -> int:
        """The same of a text of so many tokens, of which others hold `rows`."""
        return self.rows(rows)

    def capacity(self, rows: int, rounded: Callable[[int], int]) -> int:
        """Rows to make room for where texts have `rows`. rounded: what there is for so many."""
        return rounded(self.rows(rows))

    def fits(self, capacity: int) -> int | None:
        """Rows of a text for which so much room is enough; None: any number."""
        return None


@dataclass(frozen=True)
class Latest(Held):
    """The states keep `budget` rows, and those since the text's last multiple of `block`.

    So before a step they hold `past(rows)`: all, until they are `budget` + `block`; where the text
    then ends a block, something leaves `budget` of them. With a budget of 0, the last block's
    alone, over which the next one's are written.
    """

    budget: int
    block: int

    @property
    def most(self) -> int:
        """Rows of a full state."""
        return self.budget + self.block

    def past(self, rows: int) -> int:
        """Rows before a step's own."""
        return min(rows, self.budget + rows % self.block)

    def rows(self, rows: int) -> int:
        return min(rows, self.most)


@dataclass(frozen=True)
class First(Held):
    """The states have a row for each of a text's first `count`, which steps do not write."""

    count: int

    def rows(self, rows: int) -> int:
        return min(rows, self.count)

    def capacity(self, rows: int, rounded: Callable[[int], int]) -> int:
        return rounded(self.count)


@dataclass(frozen=True)
class Groups(Held):
    """The states have a row for every `each` rows of a text, which steps do not write."""

    each: int

    def rows(self, rows: int) -> int:
        return -(-rows // self.each)

    def capacity(self, rows: int, rounded: Callable[[int], int]) -> int:
        return self.rows(rounded(rows))

    def fits(self, capacity: int) -> int:
        return capacity * self.each


@dataclass(frozen=True)
class Together(Held):
    """The states have rows that all texts of a batch begin with, which steps do not write."""

    def rows(self, rows: int) -> int:
        """See `Held.rows`: none is a text's own."""
        return 0

    def capacity(self, rows: int, rounded: Callable[[int], int]) -> int:
        """See `Held.capacity`: room for more is made by whoever has something to share."""
        return rounded(1)


@dataclass(frozen=True)
class Texts(Held):
    """The states have a row for every token of a text, whatever others keep of it. They are a
    draft's, which makes room for them itself."""

    def rows(self, rows: int) -> int:
        """See `Held.rows`: of a text of which nothing was dropped."""
        return rows

    def rows_of(self, rows: int, tokens: int) -> int:
        return tokens

    def capacity(self, rows: int, rounded: Callable[[int], int]) -> int:
        """See `Held.capacity`: how long texts are, the rows of others do not say."""
        return rounded(1)
