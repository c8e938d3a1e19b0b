"""Draft a tree by a search over tri-grams (ADED).

Before::

    decode {
      draft = none()

After (path="corpus.txt")::

    weight trigrams: i64[1000]

    decode {
      draft = trigrams(weight="trigrams", nodes=24, depth=4, searches=150, ...)

The corpus is optional: without one the matrix begins empty, and there is no weight. A text file is
read by the model's own tokenizer; a .jsonl file holds ``{"text": ...}`` or ``{"ids": [...]}`` a
line, a document each, a .json file token ids, a list or a list of lists. Refuses what
`draft_corpus` refuses of a file, and a program that has such a weight already.
"""

from __future__ import annotations

from typing import ClassVar

from ...policies import builds
from ..corpus.graph import CorpusPass
from . import TrigramDraft


@builds(TrigramDraft)
class DraftTrigrams(CorpusPass):
    """path: of the corpus. The rest: see the record."""

    held: ClassVar[str] = "trigrams"
