"""Text to train on: whatever the user has, as windows of token ids; or the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..ir import InputError, Program
from ..ir.support.files import LARGE, check_regular, plain_path, read_text
from ..prompts import Prompts, encoder, read_prompts, refuse_sources
from ..runtime.asking.options import BEST

HELD_OUT = 10
"""One in so many documents is kept for measuring."""


def read_corpus(data: Prompts | torch.Tensor | None, program: Program) -> list[list[int]]:
    """Documents as token ids.

    data: a text file, a folder of them (all that are UTF-8, by path), a .jsonl of prompts, a .npy
    of integers, a tensor of token ids [N] or [N,T], or a sequence of texts or token ids. Errors:
    `InputError` saying which file cannot be used, or that nothing is there.
    """
    refuse_sources(program)
    documents = _documents(data, program)
    size = program.info.vocab_size
    for document in documents:
        strange = next((token for token in document if not 0 <= token < size), None)
        if strange is not None:
            raise InputError(f"data: token id {strange} is outside the vocabulary of {size}")
    documents = [document for document in documents if document]
    if not documents:
        raise InputError("data: expected text to train on, and there is none")
    return documents


def _documents(data: Prompts | torch.Tensor | None, program: Program) -> list[list[int]]:
    if isinstance(data, (torch.Tensor, np.ndarray)):
        return _rows(torch.as_tensor(data))
    if not isinstance(data, (str, Path)):
        return read_prompts(data or [], program)
    path = plain_path("data", data)
    if path.is_dir():
        encode = encoder(program)
        return [encode(text) for text in map(_text, sorted(path.rglob("*"))) if text]
    if path.suffix == ".npy":
        return _rows(_array(path))
    if path.suffix == ".jsonl":
        return read_prompts(path, program)
    text = _text(path)
    if text is None:
        raise InputError(f"data: {path} is not a UTF-8 text file")
    return [encoder(program)(text)]


def _array(path: Path) -> torch.Tensor:
    """The integers of a .npy, i64."""
    try:
        check_regular(path)
        # Mapped, so that a header that asks for more than there is takes no memory.
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # numpy's are of many kinds
        said = " ".join(str(error).split())[:300]
        raise InputError(f"data: cannot read {path}: {type(error).__name__}: {said}") from error
    if array.dtype.kind not in "iu":
        raise InputError(f"data: expected integers in {path}, got {array.dtype}")
    return torch.from_numpy(array.astype(np.int64))


def _text(path: Path) -> str | None:
    try:
        return read_text(path, LARGE) if path.is_file() else None
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise InputError(f"data: cannot read {path}: {error}") from error


def _rows(ids: torch.Tensor) -> list[list[int]]:
    if ids.dtype.is_floating_point or ids.dim() not in (1, 2):
        raise InputError(
            f"data: expected token ids, integers [N] or [N,T], got {ids.dtype} {list(ids.shape)}"
        )
    rows: list[list[int]] = (ids if ids.dim() == 2 else ids[None]).tolist()
    return rows


def split(documents: Sequence[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """What to train on, and what to measure on: every tenth document, or the end of the only one.

    Both have something in them.
    """
    if len(documents) < HELD_OUT:
        joined = [token for document in documents for token in document]
        cut = len(joined) - max(1, len(joined) // HELD_OUT)
        return [joined[:cut] or joined], [joined[cut:]]
    held = [d for i, d in enumerate(documents) if i % HELD_OUT == HELD_OUT - 1]
    return [d for i, d in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1], held


class Windows:
    """Random windows of documents, each determined by (seed, number) alone."""

    def __init__(self, documents: Sequence[list[int]], width: int, seed: int) -> None:
        # One stream, so that short documents fill windows too.
        self.stream = torch.tensor([token for document in documents for token in document])
        self.width, self.seed = min(width, len(self.stream)), seed
        if self.width < 4:
            raise InputError(f"data: {len(self.stream)} tokens are too few to train on")

    def __call__(self, number: int, count: int) -> torch.Tensor:
        """i64[count, width], the same for the same number."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        most = len(self.stream) - self.width + 1
        starts = torch.randint(most, (count, 1), generator=generator)
        return self.stream[starts + torch.arange(self.width)]


def own_text(
    generate: Callable[..., Any], prompts: torch.Tensor, width: int, temperature: float, seed: int
) -> torch.Tensor:
    """What the model makes of prompts i64[N,P], up to i64[N,width]. Temperature 0: its best."""
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    chosen = {**BEST, "do_sample": True, **sampling} if temperature else BEST
    result: torch.Tensor = generate(
        prompts,
        attention_mask=torch.ones_like(prompts),  # a token that pads elsewhere is text here
        max_new_tokens=width - prompts.shape[1],
        eos_token_id=[],
        seed=seed,
        **chosen,
    )
    return result
