"""Pictures in prompts: rows that a model's tower made, in the places of image tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...ir import InputError, Program
from ...ir.plan import Pictures
from .options import GenerationOptions
from .text import Text

GIVEN, GRIDS = "image_embeds", "image_grid_thw"


@dataclass(frozen=True)
class PlacedRows:
    """A text's rows f[R,H] of pictures. blocks i64[R]: those of one number stand side by side.
    places i64[R,3]: in time, height and width; () where they stand as tokens do."""

    rows: torch.Tensor
    blocks: torch.Tensor
    places: torch.Tensor


def read_pictures(
    options: GenerationOptions, texts: Sequence[Text], program: Program
) -> tuple[PlacedRows, ...]:
    """The rows of each text's pictures, () where none has any; texts know where they stand.

    `image_embeds` has rows f[N,H], one for each image token of the prompts, in their order, as
    transformers takes what a tower makes, and `image_grid_thw` i64[P,3] the patches of each picture
    where rows have places of their own. Errors: `InputError` for what is no such rows or patches,
    for a model or a recipe that reads no pictures.
    """
    plan, times = program.plan.source, options.copies
    if options.image_embeds is None:
        if options.image_grid_thw is not None:
            raise InputError(f"{GRIDS}: there are no pictures; {GIVEN} has their rows")
        return ()
    if not isinstance(plan, Pictures):
        raise InputError(
            f"{GIVEN}: {program.name} reads text alone; pictures are read of llava and other "
            f"models that docs/sources.md names"
        )
    places = [
        [place for place, token in enumerate(text.tokens) if token == plan.token] for text in texts
    ]
    rows = _rows(options.image_embeds, sum(map(len, places[::times])), plan)
    grids = _grids(options.image_grid_thw, plan)
    found, start, first, begun = [], 0, program.info.vocab_size, 0
    for index, (text, own) in enumerate(zip(texts, places, strict=True)):
        if len(own) > plan.most:
            raise InputError(
                f"{GIVEN}: prompt {index // times} has {len(own)} image tokens; expected at most "
                f"{plan.most}"
            )
        text.stands = {place: first + row for row, place in enumerate(own)}
        runs = _runs(own)
        text.whole = runs if plan.together else ()
        stands, used = torch.zeros(len(own), 3, dtype=torch.int64), 0
        if plan.axes:
            stands, used = _placed(text, runs, grids[begun:], plan, index // times)
        blocks = [number for number, (begin, end) in enumerate(runs) for _ in range(begin, end)]
        numbers = torch.tensor(blocks, dtype=torch.int64)
        found.append(PlacedRows(rows[start : start + len(own)], numbers, stands))
        last = (index + 1) % times == 0
        start, begun = start + len(own) * last, begun + used * last
    if begun < len(grids):
        raise InputError(f"{GRIDS}: {len(grids)} pictures, and the prompts have {begun}")
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


def _grids(given: torch.Tensor | None, plan: Pictures) -> list[list[int]]:
    """What was given, checked: of each picture its rows in time, height and width."""
    if not plan.axes:
        if given is not None:
            raise InputError(f"{GRIDS}: rows of this model's pictures stand as tokens do")
        return []
    fits = given is not None and given.dtype == torch.int64 and given.shape[1:] == (3,)
    if given is None or not fits or bool((given < 1).any()):
        got = "nothing" if given is None else f"{given.dtype} of {list(given.shape)}"
        raise InputError(
            f"{GRIDS}: expected i64[P,3], of each picture the patches in time, height and width, "
            f"which the processor says, got {got}"
        )
    sides: list[list[int]] = given.tolist()
    return [[time, high // plan.merged, wide // plan.merged] for time, high, wide in sides]


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of places that follow one another."""
    starts = [b for a, b in pairwise([-2, *places]) if b != a + 1]
    ends = [a + 1 for a, b in pairwise([*places, -2]) if b != a + 1]
    return list(zip(starts, ends, strict=True))


def _placed(
    text: Text,
    runs: Sequence[tuple[int, int]],
    grids: Sequence[Sequence[int]],
    plan: Pictures,
    prompt: int,
) -> tuple[torch.Tensor, int]:
    """The places i64[R,3] of a text's rows, a picture a run, and how many pictures it has; the text
    knows the positions of its tokens. A picture takes up as many as its longer side has rows."""
    if len(runs) > len(grids):
        raise InputError(
            f"{GRIDS}: prompt {prompt} has {len(runs)} pictures, {len(grids)} are left"
        )
    positions: list[int] = []
    made, done, place = [], 0, 0
    for (begin, end), (time, high, wide) in zip(runs, grids, strict=False):
        if time * high * wide != end - begin:
            raise InputError(
                f"{GRIDS}: a picture of {time} x {high} x {wide} rows has {end - begin} image "
                f"tokens in prompt {prompt}"
            )
        positions += range(place, place + begin - done)
        place += begin - done
        sides = [torch.arange(count) for count in (time, high, wide)]
        made.append(torch.cartesian_prod(*sides) + place)
        place += max(high, wide)
        positions += [place - 1] * (end - begin)
        done = end
    positions += range(place, place + len(text.tokens) - done)
    text.places = positions if runs else ()
    none = torch.zeros(0, 3, dtype=torch.int64)
    return torch.cat([none, *made]), len(runs)
