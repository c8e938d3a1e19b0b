"""A report as a page, and as a card in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .cards import card
from .html import bars, escaped, folding, page, table


@dataclass(frozen=True)
class Told:
    """What a report says. passes: rows under `heads`; options: of each, as text. notes: for people.
    quality: names and texts. memory: bytes by part, what is not known left out. acceptance: share
    of drafts whose first, second, ... token was kept; drafts: whether there are any."""

    title: str
    facts: Sequence[tuple[str, str]]
    heads: Sequence[str]
    passes: Sequence[Sequence[str]]
    options: Sequence[tuple[str, str]]
    notes: Sequence[str]
    quality: Sequence[tuple[str, str]]
    memory: Mapping[str, int]
    acceptance: Sequence[float]
    drafts: bool

    def page(self) -> str:
        """One HTML file."""
        body = [table(("", ""), self.facts, text=(1,))]
        body += [f'<p class="note">{escaped(note)}</p>' for note in self.notes]
        body += ["<h2>Passes</h2>", table(self.heads, self.passes, text=(4,))]
        options = "\n".join(f"{name}: {text}" for name, text in self.options)
        body.append(folding("options", f'<div class="lines">{escaped(options)}</div>'))
        if self.quality:
            body += ["<h2>Quality</h2>", table(("", ""), self.quality, text=(1,))]
        if self.memory:
            body += ["<h2>Memory</h2>", _bars(self.memory)]
        if self.drafts:
            body += ["<h2>Accepted drafts</h2>", self._accepted()]
        return page(self.title, *body)

    def card(self) -> str:
        """A short piece of HTML."""
        facts = [f"{name}: {text}" for name, text in [*self.facts, *self.quality]]
        return card(self.title, [*facts, *self.notes], self.heads, self.passes)

    def _accepted(self) -> str:
        if not self.acceptance:
            return '<p class="quiet">nothing was drafted yet: generate a text first</p>'
        rows = [(f"token {i}", x, f"{x:.1%}") for i, x in enumerate(self.acceptance, 1)]
        what = "Of the drafts that were verified so far, the share whose n-th token was kept."
        return f'<p class="quiet">{what}</p>{bars(rows)}'


def _bars(memory: Mapping[str, int]) -> str:
    most = max(memory.values(), default=0) or 1
    return bars([(name, size / most, _bytes(size)) for name, size in memory.items()])


def _bytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
