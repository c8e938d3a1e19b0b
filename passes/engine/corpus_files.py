"""Files of texts that passes take along: their tokens, one document behind the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...ir import InputError, PassError, Program
from ...ir.support.files import LARGE, read_json, read_text
from ...ir.support.tokenizer import encode, read_tokenizer


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
