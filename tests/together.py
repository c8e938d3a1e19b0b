"""The parts of a program, run in threads of one process that exchange what processes would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from graftwork.ir.ops import parallel


class Together:
    """`count` threads, each in the place of the process of one rank."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.met = threading.Barrier(count, timeout=60)
        self.given: list[Any] = [None] * count
        self.mine = threading.local()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchanged(tensor.clone())).sum(0))

    def all_gather(self, found: list[torch.Tensor], mine: torch.Tensor) -> None:
        found[:] = self._exchanged(mine)

    def _exchanged(self, mine: Any) -> list[Any]:
        self.given[self.mine.rank] = mine
        self.met.wait()
        found = list(self.given)
        self.met.wait()
        return found

    def run(self, work: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each rank's work gives."""

        def one(rank: int) -> Any:
            self.mine.rank = rank
            try:
                return work[rank]()
            except BaseException:
                self.met.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))


def together(monkeypatch: pytest.MonkeyPatch, count: int) -> Together:
    """Threads that the ops of `ir.ops.parallel` take for processes."""
    found = Together(count)
    monkeypatch.setattr(parallel, "join", lambda *_: None)
    monkeypatch.setattr(parallel.dist, "all_reduce", found.all_reduce)
    monkeypatch.setattr(parallel.dist, "all_gather", found.all_gather)
    return found
