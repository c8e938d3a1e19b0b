"""Texts that are read and not continued: the states of their tokens, pooled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from ..ir import InputError, Program, UnsupportedError
from ..ir.execution.executable import Executable
from ..ir.plan.source import STATES
from .asking.text import Text
from .cache.base import CACHES
from .cache.conversations import Conversations
from .feeding.draft import UnverifiedStep
from .feeding.feed import Feeder
from .feeding.prefill import prefill
from .stats import Stats

POOLINGS = ("mean", "last")
AT_ONCE = 8
"""Texts that are read side by side."""


def reading_of(program: Program) -> str:
    """The function that texts are embedded by. Errors: `UnsupportedError` for a program without."""
    name = f"{program.plan.step.read(argmax=False)[0]}.{STATES}"
    if name not in program.functions:
        raise UnsupportedError(
            f"{program.name} gives no hidden states with this recipe: its steps are cut into parts "
            f"(step={program.plan.step.kind}), its texts are written from sources, or its logits "
            f"come of no product with a weight. Optimize a decoder with a recipe that runs whole "
            f"steps, such as baseline, int8 or int4"
        )
    return name


def check_pooling(pooling: object) -> None:
    """Errors: `InputError` for what is none."""
    if pooling not in POOLINGS:
        raise InputError(f"pooling: expected {' or '.join(POOLINGS)}, got {pooling!r}")


class Reading:
    """Some texts while they are read, in the place of a `Decoding`.

    executable: over as many sequences. states: f32[B,H], once `starting` has ended: the mean of
    each text's token states, or the last one's. Errors: `UnsupportedError` for a program without
    states.
    """

    def __init__(self, executable: Executable, texts: Sequence[Text], pooling: str) -> None:
        program = executable.program
        self.texts, self.pooling, self.stats = texts, pooling, Stats()
        self.cache = CACHES.find(program.plan.cache)(program.plan.cache, executable)
        self.feeder = Feeder(executable, len(texts), reading_of(program))
        self.sums: list[torch.Tensor | None] = [None] * len(texts)

    def starting(self) -> Generator[None, int | None, None]:
        """Read, piece by piece; sent: tokens of the next piece at most."""
        texts, most = self.texts, self.cache.most
        rows = max(len(text.tokens) for text in texts)
        self.feeder.begin(rows if most is None else min(rows, most), 0)
        self.cache.begin(len(texts))
        yield from prefill(self.feeder, texts, (STATES,), self.cache, told=self._take)
        for text in texts:
            text.done = True

    def _take(self, fed: UnverifiedStep) -> None:
        for index, row in enumerate(fed.rows):
            if not row:
                continue
            states = fed.outputs[STATES][index, : len(row)].float().cpu()
            before = self.sums[index]
            if self.pooling == "last":
                self.sums[index] = states[-1].clone()
            else:
                self.sums[index] = states.sum(0) if before is None else before + states.sum(0)

    @property
    def states(self) -> torch.Tensor:
        """See the class. Errors: `InputError` for what is not finite."""
        found = torch.stack([one for one in self.sums if one is not None])
        if self.pooling == "mean":
            found = found / torch.tensor([len(text.tokens) for text in self.texts])[:, None]
        if not bool(found.isfinite().all()):
            raise InputError("the model's states are not finite: its weights, or its dtype")
        return found


@torch.no_grad()
def embed(
    executable: Executable, texts: Sequence[Sequence[int]], pooling: str, *, normalize: bool
) -> torch.Tensor:
    """States f32[B,H] of texts, token ids each, pooled; see `graftwork.Model.embed`.

    The caches are free afterwards. Of several threads one runs at a time. Errors: `InputError` for
    texts that are empty, longer than the context or of ids outside the vocabulary.
    """
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: list[Any] = [None] * len(texts)
    with executable.turn:
        Conversations.of(executable).clear_buffers(executable)
        for start in range(0, len(order), AT_ONCE):
            some = order[start : start + AT_ONCE]
            reading = Reading(executable, [_whole(texts[index]) for index in some], pooling)
            for _ in reading.starting():
                pass
            for index, row in zip(some, reading.states, strict=True):
                found[index] = row
    pooled = torch.stack(found)
    return normalized(pooled) if normalize else pooled


def normalized(states: torch.Tensor) -> torch.Tensor:
    """Rows f32[B,H] of length 1."""
    return torch.nn.functional.normalize(states, dim=-1)


def _whole(tokens: Sequence[int]) -> Text:
    return Text(list(tokens), len(tokens), len(tokens) + 1)


__all__ = ["POOLINGS", "Reading", "check_pooling", "embed", "normalized", "reading_of"]
