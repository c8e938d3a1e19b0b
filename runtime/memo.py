"""What a part of a generation keeps of a text, so that a later call may go on from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import torch

from ..ir.execution.executable import Executable
from .feeding.draft import UnverifiedStep

LEARNT = "learnt"
"""Whose scratch holds what texts have taught."""

Memo: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by name, plain data: they may be written to a file."""


def learnt(executable: Executable, owner: Hashable) -> dict[Any, Any]:
    """A dict of the owner's for what texts teach it, kept from call to call until `forget`."""
    kept: dict[Any, Any] = executable.scratch(LEARNT, shared=True).setdefault(owner, {})
    return kept


class Lore(ABC):
    """What a drafter has learned of texts, whichever they were: kept from call to call (see
    `learnt`), and in files where somebody asks for that (`lore_files`). Made of the drafter's
    record."""

    @abstractmethod
    def __init__(self, record: Any) -> None: ...

    @abstractmethod
    def tensors(self) -> Memo:
        """All that is worth keeping, contiguous."""

    @abstractmethod
    def take(self, memo: Memo, vocabulary: int) -> None:
        """Replace what is known by what `tensors` of the same kind gave, perhaps of another record.
        Tokens are below `vocabulary`. Errors: `InputError` that says what is wrong with the
        tensors, of which nothing is taken then."""


class Resumes:
    """A part that has to do with what an earlier call left of a text.

    The target's caches hold a row for each of the text's first tokens. A later text that begins
    with them need not feed them again, as far as every part can go on without having seen them.
    reads: whether `read` has anything to do.
    """

    reads: bool = False

    def read(self, fed: UnverifiedStep) -> None:
        """After each step, pieces of prompts included, before it is verified."""

    def keep(self, index: int, fed: int) -> Memo:
        """What the part knows of sequence `index`, of which `fed` tokens have rows."""
        return {}

    def reach(self, memo: Memo, count: int) -> int:
        """Of `count` tokens that a new text shares with the one that `memo` (maybe empty) was kept
        of: how many of them the part need not see again. It then takes that number, or less."""
        return count

    def resume(self, index: int, memo: Memo, count: int) -> None:
        """Sequence `index`, of which `begin` was told, goes on after its first `count` tokens."""
