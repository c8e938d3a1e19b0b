"""What a step with a whole draft takes over one without, measured when a model is made.

Where drafts decide on the text (`ir.plan.length.EarnedLength`), time must not decide on drafts
while a text is written: it is measured before, once, and the number stays with the model.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from ..backends.target import Target
from ..ir import InputError, Program
from ..ir.execution.executable import Executable, Planned
from ..ir.plan import FixedLength
from ..ir.support.threads import settle
from ..runtime.generation import Generated, forget, generate
from ..runtime.loop import alone
from .corpus import SAMPLE, read_corpus

PIECE, TOKENS, ROUNDS = 48, 48, 3
"""Tokens of a piece of text, which a prompt has twice, so that drafts that copy find some; tokens
that are written, and how often."""
LEAST = 4
"""Steps that are timed, at least."""


def why_not_timed(program: Program, target: Target) -> str:
    """Why drafts cannot be timed; "" if they can be."""
    if program.plan.source.encoder is not None:
        return "it takes a model that continues texts"
    if program.info.context < 2 * PIECE + TOKENS:
        return f"it takes a context of {2 * PIECE + TOKENS} tokens"
    try:
        target.require_device()
    except InputError as error:
        return str(error)
    return ""


def draft_cost(executable: Executable) -> float | None:
    """Seconds of a step with a whole draft over those of one without, in turns, the median of some
    rounds; None where too few steps say so."""
    program = executable.program
    piece = [token % program.info.vocab_size for token in range(1, PIECE + 1)]
    if "tokenizer.json" in program.assets:
        (document, *_) = read_corpus(SAMPLE, program)
        piece = list(document)[:PIECE]
    whole = Planned(executable, replace(program.plan, length=FixedLength()))
    found: list[float] = []
    for place in range(ROUNDS + 1):
        drafted, plain = (_step(each, 2 * piece) for each in (whole, alone(executable)))
        if drafted is None or plain is None:
            return None
        if place:  # the first one compiles, and touches memory
            found.append(drafted / plain)
    forget(executable)
    return statistics.median(found)


def _step(executable: Executable, prompt: list[int]) -> float | None:
    """Seconds of a step while a prompt is continued; None where few are made."""
    forget(executable)
    settle()
    asked: dict[str, Any] = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": []}
    asked |= {"pad_token_id": 0, "return_dict_in_generate": True}
    found = generate(executable, torch.tensor([prompt]), **asked)
    assert isinstance(found, Generated)
    stats = found.stats
    return stats.decode_seconds / stats.steps if stats.steps >= LEAST else None
