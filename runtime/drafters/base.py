"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...ir.executable import Executable
from ..options import GenerationOptions
from ..registry import Registry


class Draft(NamedTuple):
    """Guessed tokens that would continue a sequence, each continuing the one before.

    probs: f32[N,V], the distributions that the tokens were sampled from: more of them are accepted
    when the verifier knows. None is lossless however the tokens came about; `probs` that they were
    not sampled from are not.
    """

    tokens: Sequence[int]
    probs: torch.Tensor | None = None

    def cut(self, count: int) -> Draft:
        """The first `count` tokens."""
        return Draft(self.tokens[:count], None if self.probs is None else self.probs[:count])


NO_DRAFT = Draft(())


class Drafter(ABC):
    """Proposes tokens for every unfinished sequence of a batch before each step.

    wants: outputs of the step function that `observe` needs. Register a subclass with
    ``@DRAFTERS.register(ItsRecord)`` in its own file of this folder.
    """

    wants: tuple[str, ...] = ()

    def __init__(self, record: Any, executable: Executable, options: GenerationOptions) -> None:
        self.record, self.executable, self.options = record, executable, options

    @property
    @abstractmethod
    def most(self) -> int:
        """Draft tokens a step and sequence, at most."""

    @abstractmethod
    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """New sequences, one prompt each."""

    @abstractmethod
    def propose(self, rooms: Sequence[int]) -> list[Draft]:
        """A draft for each sequence, of at most `rooms[b]` tokens; 0: `NO_DRAFT`."""

    @abstractmethod
    def observe(
        self, commits: Sequence[Sequence[int]], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """After each step: the tokens each sequence gained, and the step's outputs.

        `outputs` holds at least `wants`, one column a token fed (the last committed token, then the
        draft); its tensors are valid during this call only. The prefill counts as a step whose
        outputs have one column.
        """


DRAFTERS: Registry[Drafter] = Registry(__package__)
