"""What is drafted step by step, noted, and what whole sequences give: the two must agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from graftwork.ir import SOURCE, Program, run
from graftwork.runtime.speculate.proposers.base import Proposer


class Recorded(Proposer):
    """Mixed into a proposer, before it: notes what it predicted after which text and path.

    notes: set it to [] on the class that is used, before each run. blanks: whether a node without a
    prediction is noted too.
    """

    blanks = True
    notes: list[tuple[list[int], tuple[int, ...], np.ndarray]]

    def begin(self, prompts: Any) -> None:
        super().begin(prompts)
        self.so_far = [list(prompt) for prompt in prompts]

    def observe(self, taken: Any) -> None:
        super().observe(taken)
        for text, tokens in zip(self.so_far, taken.tokens, strict=True):
            text += tokens

    def root(self, count: int) -> Any:
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in self.so_far]
        return self._noted(super().root(count))

    def grow(self, tokens: Any, parents: Any, count: int) -> Any:
        self.paths = [
            [(*self.paths[b][p], t) for t, p in zip(row, up, strict=True)]
            for b, (row, up) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True))
        ]
        return self._noted(super().grow(tokens, parents, count))

    def _noted(self, level: Any) -> Any:
        for index, paths in enumerate(self.paths):
            for node, path in enumerate(paths):
                if self.blanks or level.tokens[index, node, 0] >= 0:
                    logits = level.logits[index, node].copy()
                    self.notes.append((list(self.so_far[index]), path, logits))
        return level


def calls_of(executable: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that an executable runs from now on, in order."""
    called: list[str] = []
    run = executable.run

    def noted(function: str, *given: Any) -> Any:
        called.append(function)
        return run(function, *given)

    monkeypatch.setattr(executable, "run", noted)
    monkeypatch.setattr(executable, "hold", lambda *call: lambda: noted(*call))
    return called


def states_of(program: Program, rows: int) -> dict[str, torch.Tensor]:
    """Empty caches of one sequence."""
    types = {n: s.type.bind({"B": 1, "C": rows, SOURCE: 0}) for n, s in program.states.items()}
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in types.items()}


def whole(program: Program, function: str, tokens: Sequence[int], **more: Any) -> Any:
    """A function's outputs over a whole sequence, in the reference interpreter."""
    steps = torch.arange(len(tokens))[None]
    chain = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool).tril()
    given = {"tokens": torch.tensor([list(tokens)]), "positions": steps, "select": steps}
    given |= {"past": torch.zeros(1, dtype=torch.int64), "ancestors": chain, **more}
    given |= states_of(program, len(tokens))
    inputs = [str(node.target) for node in program.function(function).inputs]
    return run(program, function, {name: given[name] for name in inputs})
