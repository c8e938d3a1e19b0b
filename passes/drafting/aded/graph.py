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

from pathlib import Path

import torch

from ....ir import PassError, Program
from ....ir.weights import Weight
from ...engine.base import Outcome
from ...engine.plan_edits import with_draft
from ...policies import RecordPass, builds
from ..corpus.graph import corpus_tokens
from . import TrigramDraft

WEIGHT = "trigrams"


@builds(TrigramDraft)
class DraftTrigrams(RecordPass):
    """path: a corpus, a text file, a .jsonl file or a .json file of token ids; "": none. The rest:
    see the record."""

    path: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.path else ()

    def run(self, program: Program) -> Outcome:
        if not self.path:
            return Outcome(with_draft(program, self.made()), 1)
        if WEIGHT in program.weights:
            raise PassError(f"{self.name}: the program has a weight {WEIGHT!r} already")
        tokens = corpus_tokens(self.name, Path(self.path), program)
        weight = Weight.of(WEIGHT, torch.tensor(tokens, dtype=torch.int64))
        added = program.replace(weights=program.weights.adding(weight))
        return Outcome(with_draft(added, self.made(weight=WEIGHT)), 1)
