"""Pictures in prompts: rows that a model's tower made, in the places of image tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ir import InputError, Program
from ...ir.plan import Pictures
from .text import Text

GIVEN = "image_embeds"


def read_pictures(
    given: object, texts: Sequence[Text], times: int, program: Program
) -> tuple[torch.Tensor, ...]:
    """The rows f[R,H] of each text's pictures, () where none has any; texts know where they stand.

    given: rows f[N,H], one for each image token of the prompts, in their order, as transformers
    takes what a tower makes. times: texts of each prompt, one after the other. Errors: `InputError`
    for what is no such rows, for a model or a recipe that reads no pictures.
    """
    if given is None:
        return ()
    plan = program.plan.source
    if not isinstance(plan, Pictures):
        raise InputError(
            f"{GIVEN}: {program.name} reads text alone; pictures are read of llava and "
            f"models whose text sees their rows as llava's does, in the order of tokens"
        )
    places = [
        [place for place, token in enumerate(text.tokens) if token == plan.token] for text in texts
    ]
    rows = _rows(given, sum(map(len, places[::times])), plan)
    found, start, first = [], 0, program.info.vocab_size
    for index, (text, own) in enumerate(zip(texts, places, strict=True)):
        if len(own) > plan.most:
            raise InputError(
                f"{GIVEN}: prompt {index // times} has {len(own)} image tokens; expected at most "
                f"{plan.most}"
            )
        text.stands = {place: first + row for row, place in enumerate(own)}
        found.append(rows[start : start + len(own)])
        start += len(own) if (index + 1) % times == 0 else 0
    return tuple(found)


def _rows(given: object, wanted: int, plan: Pictures) -> torch.Tensor:
    """What was given, checked: f[N,H] on the CPU."""
    wide = [wanted, plan.width]
    tensor = given if isinstance(given, torch.Tensor) else None
    if tensor is None or not tensor.dtype.is_floating_point or list(tensor.shape) != wide:
        got = type(given).__name__ if tensor is None else f"{tensor.dtype} of {list(tensor.shape)}"
        raise InputError(
            f"{GIVEN}: expected rows f[{wanted},{plan.width}], one for each image token "
            f"({plan.token}) of the prompts, got {got}"
        )
    if not bool(tensor.isfinite().all()):
        raise InputError(f"{GIVEN}: expected finite numbers")
    return tensor.detach().cpu()
