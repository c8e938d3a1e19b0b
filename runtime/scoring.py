"""The target's logits for whole texts, to score them: nothing is drafted, sampled or kept."""

from __future__ import annotations

import torch

from ..ir import InputError, UnsupportedError
from ..ir.executable import Executable
from ..ir.protocol import chain_inputs
from .asking.prompts import check_ids
from .asking.text import Text
from .cache.base import CACHES
from .cache.conversations import Conversations
from .feeding.feed import Feeder


@torch.no_grad()
def score(executable: Executable, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits f32[B,S,V] of what follows each token of texts i64[B,S] of one length.

    The texts run through the step as prompts do, piece by piece, and the caches lose rows as there;
    they are free afterwards. Of several threads one runs at a time, the others wait. Errors:
    `InputError` for ids of another type or shape or outside the vocabulary, and for texts longer
    than the context; `UnsupportedError` for a program without a cache.
    """
    program = executable.program
    if program.plan.source.encoder is not None:
        raise UnsupportedError(
            f"{program.name} writes from a source; scores of a text without one mean nothing. Take "
            "generate"
        )
    check_ids(input_ids, program.info)
    ids, (batch, length) = input_ids.cpu(), input_ids.shape
    if length > program.info.context and not program.plan.cache.endless:
        raise InputError(
            f"input_ids: a text of {length} tokens, and the model's context is "
            f"{program.info.context}: score it in windows"
        )
    cache = CACHES.find(program.plan.cache)(program.plan.cache, executable)
    texts = [Text([], 0, length) for _ in range(batch)]
    with executable.turn:
        feeder = Feeder(executable, batch, program.step.name, parts=program.plan.step.parts)
        Conversations.of(executable).clear_buffers(executable)
        feeder.begin(length if cache.most is None else min(length, cache.most), 0)
        cache.begin(batch)
        parts: list[torch.Tensor] = []
        while (done := sum(part.shape[1] for part in parts)) < length:
            cache.settle(texts)
            most = cache.room([text.rows for text in texts])
            width = feeder.chunk(length - done, most)
            piece = ids[:, done : done + (width if most is None else min(width, most))]
            parts.append(_piece(feeder, piece, texts[0], width))
            for text in texts:
                text.grow(piece.shape[1])
    return torch.cat(parts, 1)


def _piece(feeder: Feeder, piece: torch.Tensor, text: Text, width: int) -> torch.Tensor:
    """Logits of a piece of texts that are all as long as `text`. The step may be wider: columns
    behind a text are seen by nothing before them."""
    feeder.make_room(text.rows + width)
    count = piece.shape[1]
    given = chain_inputs(torch.nn.functional.pad(piece, (0, width - count)), text.rows)
    positions = given["positions"] + (text.position - text.rows)
    given["positions"] = positions.clamp(max=feeder.context - 1)
    inputs = {name: tensor for name, tensor in given.items() if name in feeder.names}
    logits = feeder.call(inputs, ("logits",))["logits"]
    return logits[:, :count].float().cpu().clone()


__all__ = ["score"]
