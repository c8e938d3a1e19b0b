"""Drafts put together path by path: what two paths begin with is there once."""

from __future__ import annotations

from collections.abc import Iterable

from ..feeding.draft import NO_DRAFT, Draft


class Trie:
    """A tree of tokens in which siblings differ; nodes in order of arrival, parents first.

    >>> trie = Trie()
    >>> trie.path(-1, [1, 2]), trie.path(-1, [1, 3]), trie.add(-1, 1)
    (1, 2, 0)
    >>> trie.draft().parents
    (-1, 0, 0)
    """

    __slots__ = ("parents", "places", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.places: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """The child of `parent` (-1: the root) with this token, new if there is none."""
        place = self.places.setdefault((parent, token), len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return place

    def path(self, parent: int, tokens: Iterable[int]) -> int:
        """The last node of a path below `parent`."""
        for token in tokens:
            parent = self.add(parent, token)
        return parent

    def insert(self, draft: Draft) -> list[int]:
        """Add all nodes of a draft; what they are here."""
        above = draft.parents or range(-1, len(draft.tokens) - 1)
        new = [-1]
        for token, parent in zip(draft.tokens, above, strict=True):
            new.append(self.add(new[parent + 1], token))
        return new[1:]

    def find(self, parent: int, token: int) -> int | None:
        """The child of `parent` with this token, if there is one."""
        return self.places.get((parent, token))

    def draft(self) -> Draft:
        """The draft of all nodes."""
        return Draft(self.tokens, None, tuple(self.parents)) if self.tokens else NO_DRAFT
