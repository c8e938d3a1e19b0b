"""Prompts that a call gives as rows of embeddings: ``inputs_embeds``, as transformers takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ...ir import InputError, Program
from ...ir.plan.source import EMBEDS
from .options import GenerationOptions
from .text import Text

GIVEN = "inputs_embeds"


def read_embeds(
    input_ids: torch.Tensor, options: GenerationOptions, program: Program
) -> tuple[torch.Tensor, GenerationOptions]:
    """Tokens i64[B,S] in the places of a call's rows f[B,S,H], and its options: with a mask.

    input_ids: the rows' tokens i64[B,S], or i64[B,0] where they have none, whose places hold 0
    then. Errors: `InputError` for what are no such rows, or no tokens of them, and for programs
    that read tokens alone.
    """
    rows = options.inputs_embeds
    assert rows is not None
    if program.plan.source.encoder is not None:
        raise InputError(
            f"{GIVEN}: {program.name} reads a source first, of tokens or features: give that"
        )
    for name in ("image_embeds", "guidance_scale"):
        if options.asks(name):
            raise InputError(f"{GIVEN}: expected no {name} beside it: put all rows into {GIVEN}")
    if rows.dim() != 3 or not rows.numel() or not rows.dtype.is_floating_point or rows.is_meta:
        raise InputError(
            f"{GIVEN}: expected rows f[B,S,H], what the model's get_input_embeddings() makes of "
            f"tokens, got {rows.dtype} of shape {list(rows.shape)}"
        )
    if not bool(rows.isfinite().all()):
        raise InputError(f"{GIVEN}: expected finite numbers")
    shape, ids = rows.shape[:2], input_ids
    if not ids.numel() and len(ids) in (0, len(rows)):
        ids = torch.zeros(shape, dtype=torch.int64)
    elif ids.shape != shape:
        raise InputError(
            f"input_ids: expected the tokens of {GIVEN}, i64{list(shape)}, or none, got shape "
            f"{list(ids.shape)}"
        )
    mask = options.attention_mask
    if mask is None:  # as transformers: without a mask rows are all text
        mask = torch.ones(shape, dtype=torch.int64)
    elif mask.shape != shape:
        raise InputError(
            f"attention_mask: expected the shape of {GIVEN} {list(shape)}, got {list(mask.shape)}"
        )
    return ids, replace(options, attention_mask=mask)


def place_embeds(
    options: GenerationOptions, texts: Sequence[Text], first: int, *, known: bool
) -> tuple[torch.Tensor, ...]:
    """The rows f[R,H] of each text; texts know that they are fed, as ids from `first` on.

    options: of `read_embeds`. known: whether the texts' tokens are.
    """
    rows, mask = options.inputs_embeds, options.attention_mask
    assert rows is not None and mask is not None
    found = []
    for index, text in enumerate(texts):
        own = index // options.copies
        found.append(rows[own][mask[own].to(rows.device) != 0].detach().cpu())
        text.stands = {place: first + place for place in range(text.prompt)}
        text.unknown = 0 if known else text.prompt
    return tuple(found)


def reader_of(program: Program, *, argmax: bool) -> tuple[tuple[str, int], str, tuple[str, ...]]:
    """What reads prompts of rows: the functions that do what `read`, `ahead` and `parts` of the
    step do with tokens."""
    step = program.plan.step
    name, spare = step.read(argmax)
    ahead = step.ahead and f"{step.ahead}.{EMBEDS}"
    if step.parts:
        return (name, spare), ahead, (f"{step.parts[0]}.{EMBEDS}", *step.parts[1:])
    return (f"{name}.{EMBEDS}", spare), ahead, ()


def rows_read(program: Program) -> bool:
    """Whether the plan's prompts may be rows: another model that reads along knows tokens alone."""
    if program.plan.step.along:
        return False
    both = [reader_of(program, argmax=argmax) for argmax in (True, False)]
    called = [
        (*(parts or (name,)), *([ahead] if ahead else [])) for (name, _), ahead, parts in both
    ]
    return all(function in program.functions for each in called for function in each)


def check_rows(rows: torch.Tensor, program: Program) -> None:
    """Errors: `InputError` for rows f[..., H] of another width than the compiled program's, and for
    a program whose prompts are tokens."""
    if not rows_read(program):
        raise InputError(
            f"{GIVEN}: {program.name} with this recipe makes more of a prompt's tokens than one "
            f"row each (its draft is {program.plan.draft.brief}): give input_ids, or take another "
            f"recipe"
        )
    width = program.states[EMBEDS].type.dims[-1]
    if rows.shape[-1] != width:
        raise InputError(
            f"{GIVEN}: expected rows of {width} numbers, as the model's embedding has, got "
            f"{rows.shape[-1]}"
        )


__all__ = ["check_rows", "place_embeds", "read_embeds", "reader_of", "rows_read"]
