"""What a cache policy is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir.execution.executable import Executable
from ..asking.text import Text
from ..registry import Registry


class CachePolicy:
    """Says when the states of a generation lose rows.

    most: rows that they hold of a sequence at most; None: one for every token of its text. least:
    tokens of a run behind an edit whose rows may be kept (see `runtime/edits`); None: no rows may.
    shares: whether rows that all texts of a batch begin with are held once; shared: how many are.
    Register a subclass with ``@CACHES.register(ItsRecord)`` in its own file of this folder.
    """

    most: int | None = None
    least: int | None = None
    shares: bool = False
    shared: int = 0

    def __init__(self, record: Any, executable: Executable) -> None:
        self.record, self.executable = record, executable

    def begin(self, batch: int) -> None:
        """A generation of so many new sequences starts; their states hold nothing."""

    def share(self, texts: Sequence[Text], known: Sequence[int]) -> None:
        """Set `shared`, where rows of the first `known[b]` tokens of each text are to be had."""

    def place(self, rows: Mapping[str, torch.Tensor]) -> None:
        """Put the `shared` rows of these states where all sequences have them in common."""

    def room(self, rows: Sequence[int]) -> int | None:
        """Tokens that a step may add to every sequence before the policy must have its turn.

        rows: what the states hold of each sequence. None: any number.
        """
        return None

    def back_to(self, fed: int, count: int) -> int:
        """Of a text of which `fed` tokens were fed, how many of the first `count` a new text that
        begins with those may go on from. A state that lost rows cannot go back to before it did."""
        return count if count == fed else 0

    def settle(self, texts: Sequence[Text]) -> None:
        """Before each step and piece of a prompt: drop due rows, and update the texts' places."""


CACHES: Registry[CachePolicy] = Registry(__package__)
