"""What a pass may learn from text that the user gives, and where it keeps what it learned.

A pass says how much text it must see (`Pass.text`); the manager hands it an `Evidence`. So passes
stay functions of a program, their options and that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...ir import InputError, Program
from ...ir.support.scratch import Scratch


@dataclass(frozen=True)
class TextSample:
    """Windows of text, and tokens of each at most: what a model's context holds is enough."""

    windows: int
    length: int

    def width(self, program: Program) -> int:
        """Tokens of a window for this model."""
        return min(self.length, program.info.context)


class WorkFolder:
    """A folder for what is worked out: the user's, which stays, or a temporary one, which goes with
    this object. Errors: `InputError` for a path that cannot be a folder."""

    def __init__(self, path: Path | None = None) -> None:
        self._scratch = Scratch() if path is None else None
        self.path = self._scratch.path if self._scratch is not None else Path(path or "")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"work: cannot use {self.path} as a folder: {error}") from error


@dataclass(frozen=True)
class Evidence:
    """Text to learn from.

    tokens: ids i64[N], documents one after the other. work: where results lie; what lies there of
    an earlier run on the same program, options and text is used again. progress: told what is being
    done, and which share of it is done. bundled: nobody gave a text, and it is as long as it is.
    """

    tokens: torch.Tensor
    work: WorkFolder
    progress: Callable[[str, float], None] = lambda what, share: None
    bundled: bool = False

    def check(self, sample: TextSample, program: Program, who: str) -> None:
        """Errors: `InputError` if the text is too short, or is not of this model's tokens."""
        sample = self._there(sample, program)
        width = sample.width(program)
        wanted = sample.windows * width
        if len(self.tokens) < wanted:
            raise InputError(
                f"data: {who} looks at {sample.windows} windows of {width} tokens, {wanted} in "
                f"all, and the text has {len(self.tokens)}: give {wanted - len(self.tokens)} more, "
                f"or set its options windows and length"
            )
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= program.info.vocab_size:
            strange = low if low < 0 else high
            raise InputError(
                f"data: token id {strange} is outside the vocabulary of {program.info.vocab_size}"
            )

    def sampled(self, sample: TextSample, program: Program) -> torch.Tensor:
        """Windows i64[windows,width], spread evenly over the text. Where texts of this model begin
        with a token of their own, each window does: without it some models are others."""
        return sampled(self.tokens, self._there(sample, program), program)

    def _there(self, sample: TextSample, program: Program) -> TextSample:
        """The sample, or as much of it as the bundled text has."""
        if not self.bundled:
            return sample
        width = min(sample.width(program), len(self.tokens))
        return TextSample(min(sample.windows, len(self.tokens) // max(width, 1)), width)


def sampled(tokens: torch.Tensor, sample: TextSample, program: Program) -> torch.Tensor:
    """See `Evidence.sampled`, of ids i64[N]."""
    width = sample.width(program)
    last = len(tokens) - width
    starts = [last * i // max(1, sample.windows - 1) for i in range(sample.windows)]
    windows = torch.stack([tokens[start : start + width] for start in starts])
    if int(tokens[0]) == program.info.bos:
        windows[:, 0] = program.info.bos
    return windows
