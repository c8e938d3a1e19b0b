"""Draft by counts of what followed n-grams: in this text, in earlier texts, in a corpus.

Before::

    decode {
      draft = none()

After (path="corpus.txt")::

    weight ngrams: i64[1000]

    decode {
      draft = ngram_cache(weight="ngrams", tokens=8, lax=((2, 66), ...), strict=((4, 75), ...))

The corpus is optional: without one there is no static cache, and no weight. A text file is read by
the model's own tokenizer; a .jsonl file holds ``{"text": ...}`` or ``{"ids": [...]}`` a line, a
document each, a .json file token ids, a list or a list of lists. Refuses what `draft_corpus`
refuses of a file, and a program that has such counts already.
"""

from __future__ import annotations

from typing import ClassVar

from ...policies import builds
from ..corpus.graph import CorpusPass
from . import NgramCacheDraft


@builds(NgramCacheDraft)
class DraftNgramCache(CorpusPass):
    """path: of the static cache's corpus. The rest: see the record."""

    held: ClassVar[str] = "ngrams"
