"""What texts begin with that are written from a source: of speech, a language and a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir import InputError, Program
from ...ir.plan import Encoded
from .options import GenerationOptions

LANGUAGE = "language"


def openings(
    options: GenerationOptions, batch: int, plan: Encoded, heard: Sequence[str] = ()
) -> list[list[int]]:
    """What the texts of so many sources begin with. heard: their languages, where the call does not
    say them and they matter; until they are known, another one stands in their place.

    Errors: `InputError` for languages and tasks that the model does not know, and for others than
    one language, or one a source.
    """
    said = options.language
    languages: Sequence[str | None] = (
        [said] * batch if said is None or isinstance(said, str) else said
    )
    if len(languages) != batch:
        raise InputError(
            f"language: expected one, or one for each of {batch} sources, got {len(languages)}"
        )
    if not heard and plan.hears(languages[0], options.task):
        heard = [plan.languages[0]] * batch
    found: Sequence[str | None] = heard or [None] * batch
    return [
        plan.opening(language, options.task, own)
        for language, own in zip(languages, found, strict=True)
    ]


def listens(options: Mapping[str, Any], program: Program) -> Encoded | None:
    """The plan's source, if the language of a call has to be heard."""
    plan = program.plan.source
    if not isinstance(plan, Encoded) or options.get("decoder_input_ids") is not None:
        return None
    return plan if plan.hears(options.get(LANGUAGE), options.get("task")) else None


def to_hear(plan: Encoded, batch: int, vocabulary: int) -> dict[str, Any]:
    """Options of a call that yields one token, a language's (Radford et al., "Whisper", 2022)."""
    known = set(plan.language_tokens)
    return {
        "decoder_input_ids": torch.tensor([plan.start] * batch),
        "max_new_tokens": 1,
        "do_sample": False,
        "num_beams": 1,
        "suppress_tokens": [token for token in range(vocabulary) if token not in known],
        "begin_suppress_tokens": (),
        "eos_token_id": [],
    }
