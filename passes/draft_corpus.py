"""Draft by copying from a corpus, or from the text itself where that matches further.

Before::

    decode {
      draft = none()

After (path="corpus.json")::

    weight corpus: i64[1000]

    decode {
      draft = corpus(weight="corpus", tokens=16, shortest=2)

The file holds token ids: a JSON list, or a list of lists, a document each. They become a weight, so
that a saved program needs no file (SAM decoding, Hu et al. 2024). Refuses a file that holds no
tokens of the vocabulary, and a program that has a corpus already.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from ..ir import PassError, Program
from ..ir.plan import CorpusDraft
from ..ir.weights import Weight
from .base import Contract, Effect, Outcome, Pass, register
from .plan_edits import with_draft

WEIGHT = "corpus"


@register
class DraftCorpus(Pass):
    """path: the corpus. tokens: drafted a step at most. shortest: tokens that must match."""

    path: str
    tokens: int = Field(default=16, ge=1)
    shortest: int = Field(default=2, ge=1)

    name: ClassVar[str] = "draft_corpus"
    contract: ClassVar[Contract] = Contract.LOSSLESS
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"drafts"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.DECODE_PLAN})

    def run(self, program: Program) -> Outcome:
        """Add the weight and the drafter. See the module docstring."""
        if WEIGHT in program.weights:
            raise PassError(f"draft_corpus: the program has a weight {WEIGHT!r} already")
        tokens = read_tokens(self.name, Path(self.path), program.info.vocab_size)
        weight = Weight.of(WEIGHT, torch.tensor(tokens, dtype=torch.int64))
        added = program.replace(weights=program.weights.adding(weight))
        return Outcome(with_draft(added, CorpusDraft(WEIGHT, self.tokens, self.shortest)), 1)


def read_tokens(owner: str, path: Path, vocabulary: int) -> list[int]:
    """A file's tokens, with -1 after each document. Errors: `PassError` naming owner and file."""
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PassError(
            f"{owner}: cannot read token ids from {path}: {error}; expected a JSON list of "
            f"token ids, or of such lists"
        ) from error
    nested = isinstance(given, list) and bool(given) and all(isinstance(d, list) for d in given)
    documents = given if nested else [given]
    tokens: list[int] = []
    for document in documents:
        if not isinstance(document, list) or not document or not all(map(_is_id, document)):
            raise PassError(f"{owner}: {path} is no JSON list of token ids, nor of such lists")
        tokens += [*document, -1]
    most = max(tokens)
    if most >= vocabulary or min(t for d in documents for t in d) < 0:
        raise PassError(
            f"{owner}: {path} holds ids outside 0..{vocabulary - 1}, the model's vocabulary: "
            f"tokenize it with the model's own tokenizer"
        )
    return tokens


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
