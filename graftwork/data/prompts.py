"""Prompts: texts, token ids, or a file of either."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..ir import InputError, Program
from ..ir.program import ModelInfo
from ..ir.support.files import LARGE, plain_path, read_text
from ..ir.support.names import shown
from ..ir.support.tokenizer import check_length, encode, read_tokenizer
from ..runtime.asking.options import MOST_SEED

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompts = str | Path | Sequence[str] | Sequence[Sequence[int]]
"""A path to a .txt (one prompt a line) or .jsonl file (``{"ids": [...]}`` or ``{"text": "..."}`` a
line), a sequence of texts, or a sequence of token id sequences."""

VALIDATION_PROMPTS = 4
VALIDATION_TOKENS = 48


def as_ids(input_ids: Any) -> torch.Tensor:
    """Token ids as i64[B,S]; a single sequence becomes a batch of one.

    Errors: `InputError` if they are not integers, or sequences differ in length.
    """
    if isinstance(input_ids, str):
        raise InputError("input_ids: expected token ids, got text; encode it with model.tokenizer")
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"input_ids: expected token ids [B,S], sequences of one length ({error}); "
            f"pad shorter ones on the left and give attention_mask"
        ) from error
    if ids.is_meta:
        raise InputError("input_ids: expected token ids, got a tensor without data (device meta)")
    if ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
        raise InputError(f"input_ids: expected integers, got {ids.dtype}")
    if ids.dim() not in (1, 2):
        raise InputError(f"input_ids: expected [B,S], got shape {list(ids.shape)}")
    return (ids if ids.dim() == 2 else ids[None]).long()


def as_prompts(
    given: Any, program: Program, read: Callable[[], Tokenizer] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as ids i64[B,S] and, where they are not equally long, their mask i64[B,S], with
    padding on the left. given: a text, texts, or whatever `as_ids` takes, rows of any lengths.
    read: gives the tokenizer, where that is read already.

    Errors: `InputError` for what is neither, and for texts where the program has no tokenizer.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        return as_ids(given), None
    if all(isinstance(item, str) for item in given):
        endless = program.plan.cache.endless
        most = None if endless else program.info.context
        encode = encoder(program, "input_ids", most, read)
        given = [encode(text) for text in given]
    if not all(isinstance(row, (list, tuple)) for row in given) or len(set(map(len, given))) == 1:
        return as_ids(given), None
    ids = [as_ids(row)[0] if len(row) else torch.zeros(0, dtype=torch.int64) for row in given]
    width = max(map(len, ids))
    pad = program.info.pad if program.info.pad is not None else next(iter(program.info.eos), 0)
    rows = [torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in ids]
    kept = [torch.arange(width) >= width - len(row) for row in ids]
    return torch.stack(rows), torch.stack(kept).long()


def refuse_sources(program: Program) -> None:
    """Errors: `InputError` for an encoder-decoder program, whose texts need their sources."""
    if program.plan.source.encoder is not None:
        raise InputError(
            f"{program.name} is an encoder-decoder, whose texts need their sources: validate on "
            "random ones (without data), and take a recipe that neither calibrates nor trains on "
            "text"
        )


def read_prompts(data: Prompts, program: Program) -> list[list[int]]:
    """All prompts as token ids. Errors: `InputError` with the file and line that cannot be read,
    and for encoder-decoder models."""
    refuse_sources(program)
    if isinstance(data, (str, Path)):
        items: list[Any] = _read_file(plain_path("data", data))
    else:
        check_file(data)
        items = list(data)
    texts = [item for item in items if isinstance(item, str)]
    encode = encoder(program) if texts else None
    prompts = [encode(item) if encode and isinstance(item, str) else _ids(item) for item in items]
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise InputError("data: expected at least one prompt that is not empty")
    check_ids(prompts, program)
    return prompts


def check_ids(texts: Iterable[Sequence[int]], program: Program) -> None:
    """Errors: `InputError` for token ids outside the vocabulary."""
    size = program.info.vocab_size
    strange = next((token for text in texts for token in text if not 0 <= token < size), None)
    if strange is not None:
        raise InputError(f"data: token id {strange} is outside the vocabulary of {size}")


def check_seed(seed: Any, most: int = MOST_SEED) -> None:
    """Errors: `InputError` for an invalid random seed."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= most:
        raise InputError(f"seed: expected an integer in 0..{most}, got {shown(seed)}")


def check_file(data: Prompts) -> int | None:
    """The number of prompts in a file; None if `data` is none. Errors: `InputError` if it cannot be
    read, with its line, or is no data."""
    if isinstance(data, (str, Path)):
        return len(_read_file(plain_path("data", data)))
    if not isinstance(data, Iterable):
        raise InputError(f"data: expected prompts (texts, token ids) or a file, got {data!r}")
    return None


def validation_batch(data: Prompts, program: Program) -> torch.Tensor:
    """A few prompts cut to one length, i64[B,T], for comparing programs."""
    prompts = sorted(read_prompts(data, program), key=len, reverse=True)[:VALIDATION_PROMPTS]
    width = min(VALIDATION_TOKENS, len(prompts[-1]), program.info.context)
    if width < 2:
        raise InputError("data: validation needs prompts of at least two tokens")
    return torch.tensor([prompt[:width] for prompt in prompts])


def sample_prompts(info: ModelInfo, seed: int) -> torch.Tensor:
    """Random token ids i64[2,T], reproducible from the seed, for validation without data."""
    check_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    width = min(VALIDATION_TOKENS // 2, info.context)
    return torch.randint(info.vocab_size, (2, width), generator=generator)


def _read_file(path: Path) -> list[Any]:
    try:
        lines = read_text(path, LARGE).split("\n")  # splitlines cuts at form feeds, too
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data: cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    numbered = enumerate(lines, 1)
    return [_json_prompt(line, f"{path}:{i}") for i, line in numbered if line.strip()]


def _json_prompt(line: str, where: str) -> Any:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"data: {where}: not JSON: {error}") from error
    for key, kind in (("ids", list), ("text", str)):
        if isinstance(entry, dict) and isinstance(entry.get(key), kind):
            return entry[key]
    raise InputError(f'data: {where}: expected {{"ids": [...]}} or {{"text": "..."}}')


def encoder(
    program: Program,
    what: str = "data",
    most: int | None = None,
    read: Callable[[], Tokenizer] | None = None,
) -> Callable[[str], list[int]]:
    """Text to token ids, at most `most` of them (far longer ones are refused at once). read: as in
    `as_prompts`. Errors: `InputError`, about `what`, if the program has no tokenizer."""
    path = program.assets.get("tokenizer.json")
    if path is None:
        raise InputError(f"{what}: {program.name} has no tokenizer.json; give token ids, not text")
    tokenizer = read_tokenizer(path) if read is None else read()

    def encoded(text: str) -> list[int]:
        if most is not None:
            check_length(tokenizer, text, most)
        return encode(tokenizer, text)

    return encoded


def _ids(item: Any) -> list[int]:
    if isinstance(item, list) and not item:
        return []
    try:
        ids = as_ids(item)
    except InputError as error:
        raise InputError(f"data: {error}") from error
    if ids.shape[0] != 1:
        raise InputError(f"data: expected one sequence of token ids, got shape {list(ids.shape)}")
    return [int(token) for token in ids[0]]
