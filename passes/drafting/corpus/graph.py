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

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from ....ir import InputError, PassError, Program
from ....ir.support.files import LARGE, read_json, read_text
from ....ir.support.tokenizer import encode, read_tokenizer
from ....ir.weights import Weight
from ...engine.base import Outcome
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


def corpus_tokens(owner: str, path: Path, program: Program) -> list[int]:
    """A corpus file's tokens, with -1 after each document. Errors: `PassError` naming the pass
    `owner` and the file."""
    if path.suffix == ".json":
        return read_tokens(owner, path, program.info.vocab_size)
    try:
        text = read_text(path, LARGE)
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"{owner}: cannot read text from {path}: {error}") from error
    if path.suffix == ".jsonl":
        documents = [
            _json_line(owner, f"{path}:{number}", line, program)
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    else:
        documents = [_encoded(owner, path, program, text)]
    tokens = [token for document in documents if document for token in (*document, -1)]
    if not tokens:
        raise PassError(f"{owner}: expected text in {path}, which holds none")
    vocabulary = program.info.vocab_size
    if max(tokens) >= vocabulary or any(min(d, default=0) < 0 for d in documents):
        made = max(tokens) if max(tokens) >= vocabulary else min(map(min, filter(None, documents)))
        raise PassError(
            f"{owner}: token {made} of {path} is outside the model's vocabulary of {vocabulary}: "
            f"tokenize it with the model's own tokenizer"
        )
    return tokens


def _json_line(owner: str, where: str, line: str, program: Program) -> list[int]:
    """The tokens of a line of a .jsonl file."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PassError(f"{owner}: {where}: not JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return _encoded(owner, Path(where), program, entry["text"])
    ids = entry.get("ids") if isinstance(entry, dict) else None
    if isinstance(ids, list) and all(map(_is_id, ids)):
        return ids
    raise PassError(f'{owner}: {where}: expected {{"text": "..."}} or {{"ids": [...]}}')


def _encoded(owner: str, path: Path, program: Program, text: str) -> list[int]:
    """Text as the model reads it, without tokens that mark its begin or end."""
    tokenizer = program.assets.get("tokenizer.json")
    if tokenizer is None:
        raise PassError(
            f"{owner}: {path} is text, and {program.name} came without a tokenizer.json: give "
            f"token ids in a .json file"
        )
    try:
        return encode(read_tokenizer(tokenizer), text, marked=False)
    except InputError as error:
        raise PassError(f"{owner}: {error}") from error


def read_tokens(owner: str, path: Path, vocabulary: int) -> list[int]:
    """A file's tokens, with -1 after each document. Errors: `PassError` naming owner and file."""
    try:
        given: Any = read_json(path, LARGE)
    except (OSError, ValueError) as error:
        raise PassError(
            f"{owner}: cannot read token ids from {path}: {error}; expected a JSON list of "
            f"token ids, or of such lists"
        ) from error
    nested = isinstance(given, list) and bool(given) and all(isinstance(d, list) for d in given)
    documents = given if nested else [given]
    tokens: list[int] = []
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, list) or not all(map(_is_id, document)):
            raise PassError(f"{owner}: {path} is no JSON list of token ids, nor of such lists")
        if not document:
            raise PassError(
                f"{owner}: document {number} of {len(documents)} in {path} holds no tokens: "
                f"leave it out"
            )
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
