"""Calibration text for recipes, and its progress display."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..ir import InputError, Program
from ..ir.support.files import plain_path
from ..passes.engine.evidence import Evidence, WorkFolder
from .corpus import SAMPLE, read_corpus
from .prompts import Prompts, check_file

if TYPE_CHECKING:
    from ..recipe import Recipe

CELLS = 20
"""Width of the progress bar in characters."""


class TimeLeft:
    """Formats progress with a bar and the remaining time, extrapolated from the speed so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began: tuple[float, float] | None = None

    def __call__(self, what: str, share: float) -> str:
        """``block 3 of 8 [=====>              ] 25%, 0:42 left``"""
        bar = ("=" * round(share * CELLS) + ">")[:CELLS].ljust(CELLS)
        return f"{what} [{bar}] {self.brief(share)}"

    def brief(self, share: float) -> str:
        """``25%, 0:42 left``"""
        now = self.clock()
        if self.began is None or share < self.began[1]:
            self.began = now, share  # a resumed run begins later
        start, first = self.began
        if share <= first:
            return f"{share:.0%}"
        left = round((now - start) / (share - first) * (1 - share))
        hours, minutes = divmod(left // 60, 60)
        return f"{share:.0%}, {f'{hours}:{minutes:02}' if hours else minutes}:{left % 60:02} left"


def check_data(recipe: Recipe, data: Prompts | None, validate: bool) -> None:
    """Check the data given to `optimize`, before tracing.

    Errors: `InputError` for data that the recipe needs and lacks, does not use, or cannot find.
    """
    if recipe.reads_text and data is None:
        raise InputError(
            f"recipe {recipe.name!r} needs data= (--data: texts, token ids, or a file or folder of "
            f"texts, like those that the model will see)"
        )
    if data is not None and not validate and not recipe.takes_text:
        raise InputError(
            f"data= is given, but recipe {recipe.name!r} uses none; "
            f"add validate=True to check the passes' contracts on it, or leave it out"
        )
    if data is not None:
        (check_documents if calibrates(recipe, validate) else check_file)(data)


def calibrates(recipe: Recipe, validate: bool) -> bool:
    """Whether data is text to learn from: a recipe that only does better with some leaves it to
    the check of contracts."""
    return recipe.reads_text or (recipe.takes_text and not validate)


def check_documents(data: Prompts) -> None:
    """Check documents before tracing. Errors: `InputError` if the path or texts are missing."""
    if not isinstance(data, (str, Path)):
        check_file(data)
    elif not plain_path("data", data).exists():
        raise InputError(f"data: there is no {data}: expected a text file, or a folder of them")


def evidence_for(
    recipes: Sequence[Recipe],
    program: Program,
    text: Prompts | None,
    work: str | Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Evidence | None:
    """Calibration text of recipes; None if none calibrates. Errors: as `check_text`."""
    check_text(recipes, text)
    if text is None:
        return None
    progress("read the text")
    return evidence_of(read_corpus(text, program), work, progress)


def bundled_evidence(
    recipe: Recipe, program: Program, progress: Callable[[str], None] = lambda stage: None
) -> Evidence | None:
    """The bundled text for a recipe that reads it where nobody gives one; None for others, and for
    one that does without where the model continues no texts, or has no tokenizer. Errors:
    `InputError` if the recipe cannot do without."""
    able = "tokenizer.json" in program.assets and program.plan.source.encoder is None
    if not recipe.reads_bundled or not (able or recipe.asks_for_text):
        return None
    return replace(evidence_of(read_corpus(SAMPLE, program), None, progress), bundled=True)


def check_text(recipes: Sequence[Recipe], text: Prompts | None) -> None:
    """Check calibration text before tracing. Errors: `InputError` if a recipe calibrates without
    text, or text is given and none calibrates."""
    reading = [recipe.name for recipe in recipes if recipe.reads_text]
    if reading and text is None:
        raise InputError(
            f"recipe {reading[0]!r} calibrates: give text= (--text: texts, token ids, or a file or "
            f"folder of texts, like those that the model will see)"
        )
    if text is not None and not any(recipe.takes_text for recipe in recipes):
        names = ", ".join(repr(recipe.name) for recipe in recipes)
        raise InputError(
            f"text to calibrate on is given, but of the recipes {names} none calibrates"
        )
    if text is not None:
        check_documents(text)


def evidence_of(
    documents: Sequence[Sequence[int]],
    work: str | Path | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Evidence:
    """Calibration text from tokenized documents. work: folder of intermediate results."""
    shown = TimeLeft()
    tokens = torch.tensor([token for document in documents for token in document])
    folder = WorkFolder(None if work is None else plain_path("work", work))
    return Evidence(tokens, folder, lambda what, share: progress(shown(what, share)))
