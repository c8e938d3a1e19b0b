"""Sizes that stand for all others where each that is used has its price."""

from __future__ import annotations


def sizes_up_to(most: int) -> tuple[int, ...]:
    """A few sizes for what may have any from 1 to `most`, so that the next of them is never by more
    than a third of itself too large: powers of two, from 4 on what lies half-way between them, and
    `most`.

    >>> sizes_up_to(16)
    (1, 2, 4, 6, 8, 12, 16)
    >>> sizes_up_to(7)
    (1, 2, 4, 6, 7)
    """
    found, size = {most} if most else set(), 1
    while size < most:
        found.add(size)
        if size >= 4 and 3 * size // 2 < most:
            found.add(3 * size // 2)
        size *= 2
    return tuple(sorted(found))
