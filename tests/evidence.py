"""Text for passes that learn from it: token ids that follow each other by a rule, with noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from graftwork.ir import Program
from graftwork.passes.engine.evidence import Evidence, WorkFolder


def tokens(vocab: int, count: int, seed: int = 0) -> torch.Tensor:
    """Ids i64[count]: each is what follows from the one before, or any."""
    return torch.tensor(_ids(vocab, count, seed))


@lru_cache(maxsize=16)
def _ids(vocab: int, count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    jump = torch.randint(vocab, (count,), generator=generator).tolist()
    strays = (torch.rand(count, generator=generator) < 0.4).tolist()
    ids = [0]
    for i in range(1, count):
        ids.append(jump[i] if strays[i] else (3 * ids[-1] + 1) % vocab)
    return tuple(ids)


def evidence_for(
    program: Program,
    count: int = 64 * 512,
    *,
    work: Path | None = None,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Evidence:
    """Text of a program's vocabulary."""
    return Evidence(tokens(program.info.vocab_size, count), WorkFolder(work), progress)
