"""What a drafter wants of steps that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..asking.text import Text
from ..feeding.draft import Draft, UnverifiedStep, VerifiedStep
from ..feeding.gather import piece
from ..feeding.outputs import Outputs
from ..speculate.drafters.base import Drafter


class MissedSteps:
    """Outputs of up to `most` plain steps, kept for a drafter.

    kept: by name, [most,B,1,...], what each step returned. copies: of each, its memory, that of the
    outputs `seen` last, and the length of a step's part.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        self.drafter, self.most = drafter, most
        self.kept: dict[str, torch.Tensor] = {}
        self.seen: Outputs | None = None
        self.copies: list[tuple[Any, Any, int]] = []

    def note(self, step: int, outputs: Outputs) -> None:
        """A step's outputs, which do not outlive it."""
        if outputs is not self.seen:
            self.copies = [self._copy(name, outputs[name]) for name in self.drafter.wants]
            self.seen = outputs
        for kept, value, size in self.copies:
            kept[step * size : (step + 1) * size] = value

    def _copy(self, name: str, value: torch.Tensor) -> tuple[Any, Any, int]:
        if name not in self.kept:
            self.kept[name] = value.new_empty((self.most, *value.shape))
        rows, size = piece(self.kept[name])
        row, length = piece(value[None])
        # Outputs that do not lie in one piece of memory are copied as tensors.
        return (rows, row, size) if size == length else (self.kept[name], value[None], 1)

    def tell(self, texts: Sequence[Text], starts: Sequence[int], steps: int) -> None:
        """Catch up on `steps` steps, before which texts had `starts` tokens, finished ones 0.

        To the drafter they look like one, of a chain that was accepted whole: it cannot know who
        drafts beside it, and hears what it would have learned step by step.
        """
        gained = [
            text.tokens[n : n + steps] if n else [] for text, n in zip(texts, starts, strict=True)
        ]
        drafts = [Draft(new[:-1]) for new in gained]
        paths = [range(len(draft.tokens)) for draft in drafts]
        outputs = {name: rows[:steps, :, 0].transpose(0, 1) for name, rows in self.kept.items()}
        if self.drafter.reads:
            fed = [
                text.tokens[n - 1 : n + steps - 1] if n else []
                for text, n in zip(texts, starts, strict=True)
            ]
            begun = [max(start - 1, 0) for start in starts]
            self.drafter.read(UnverifiedStep(fed, begun, outputs))
        self.drafter.observe(VerifiedStep(drafts, paths, gained, [0] * len(texts), outputs))
