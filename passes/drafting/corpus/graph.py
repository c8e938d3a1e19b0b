"""Draft by copying from a corpus, or from the text itself where that matches further.

Before::

    decode {
      draft = none()

After (path="corpus.txt")::

    weight corpus: i64[1000]

    decode {
      draft = corpus(weight="corpus", tokens=16, shortest=2)

A text file is read by the model's own tokenizer; of a .jsonl file each line, ``{"text": ...}`` or
``{"ids": [...]}``, is a document. A .json file holds token ids: a list, or a list of lists, a
document each. They become a weight, so that a saved program needs no file (SAM
decoding, Hu et al. 2024). Refuses a file that holds no tokens of the vocabulary, text for a model
that came without a tokenizer, and a program that has a corpus already.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch

from ....ir import PassError, Program
from ....ir.weights import Weight
from ...engine.base import Outcome
from ...engine.corpus_files import corpus_tokens
from ...engine.plan_edits import with_draft
from ...policies import RecordPass, builds
from . import CorpusDraft

WEIGHT = "corpus"


@builds(CorpusDraft)
class DraftCorpus(RecordPass):
    """path: the corpus, a text file, a .jsonl file or a .json file of token ids. The rest: see the
    record."""

    path: str = ""

    brings: ClassVar[str] = "a corpus file"

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,)

    def run(self, program: Program) -> Outcome:
        if WEIGHT in program.weights:
            raise PassError(f"draft_corpus: the program has a weight {WEIGHT!r} already")
        if not self.path:
            raise PassError(
                "draft_corpus: expected a corpus, got none: set the option path to a text file or "
                "a .json file of token ids (--set draft_corpus.path=FILE)"
            )
        tokens = corpus_tokens(self.name, Path(self.path), program)
        weight = Weight.of(WEIGHT, torch.tensor(tokens, dtype=torch.int64))
        added = program.replace(weights=program.weights.adding(weight))
        return Outcome(with_draft(added, self.made(weight=WEIGHT)), 1)


class CorpusPass(RecordPass):
    """Base of passes whose drafter may begin with a corpus, which their record's `weight` names.

    path: a text file, a .jsonl file or a .json file of token ids; "": none. held: the weight.
    """

    held: ClassVar[str]
    path: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.path,) if self.path else ()

    def run(self, program: Program) -> Outcome:
        if not self.path:
            return Outcome(with_draft(program, self.made()), 1)
        if self.held in program.weights:
            raise PassError(f"{self.name}: the program has a weight {self.held!r} already")
        tokens = corpus_tokens(self.name, Path(self.path), program)
        weight = Weight.of(self.held, torch.tensor(tokens, dtype=torch.int64))
        added = program.replace(weights=program.weights.adding(weight))
        return Outcome(with_draft(added, self.made(weight=self.held)), 1)
