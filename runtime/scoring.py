"""The target's logits for whole texts, to score them: nothing is drafted, sampled or kept."""

from __future__ import annotations

import torch

from ..ir import InputError
from ..ir.executable import Executable
from ..ir.protocol import chain_inputs
from .asking.prompts import check_ids
from .cache.conversations import Conversations
from .feeding.feed import Feeder


@torch.no_grad()
def score(executable: Executable, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits f32[B,S,V] of what follows each token of texts i64[B,S] of one length.

    The texts run through the step as prompts do, piece by piece; the caches' rows are free
    afterwards. Of several threads one runs at a time, the others wait. Errors: `InputError` for ids
    of another type or shape or outside the vocabulary, and for texts longer than the context;
    `UnsupportedError` for a program without a cache.
    """
    program = executable.program
    check_ids(input_ids, program.info)
    ids, (batch, length) = input_ids.cpu(), input_ids.shape
    if length > program.info.context:
        raise InputError(
            f"input_ids: a text of {length} tokens, and the model's context is "
            f"{program.info.context}: score it in windows"
        )
    with executable.turn:
        feeder = Feeder(executable, batch, program.step.name, parts=program.plan.step.parts)
        Conversations.of(executable).clear_buffers(executable)
        feeder.begin(length, 0)
        parts = []
        for fed in _starts(feeder, length):
            parts.append(_piece(feeder, ids, *fed))
    return torch.cat(parts, 1)


def _starts(feeder: Feeder, length: int) -> list[tuple[int, int]]:
    """Where each step begins, and its width."""
    found, past = [], 0
    while past < length:
        width = feeder.chunk(length - past)
        found.append((past, width))
        past += width
    return found


def _piece(feeder: Feeder, ids: torch.Tensor, past: int, width: int) -> torch.Tensor:
    """Logits of the tokens from `past` on that one step takes. It may be wider than what is left:
    columns behind a text are seen by nothing before them."""
    feeder.make_room(past + width)
    piece = ids[:, past : past + width]
    count = piece.shape[1]
    given = chain_inputs(torch.nn.functional.pad(piece, (0, width - count)), past)
    given["positions"] = given["positions"].clamp(max=feeder.context - 1)
    inputs = {name: tensor for name, tensor in given.items() if name in feeder.names}
    logits = feeder.call(inputs, ("logits",))["logits"]
    return logits[:, :count].float().cpu().clone()


__all__ = ["score"]
