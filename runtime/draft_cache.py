"""A draft function's own cache: ragged rows in, outputs of chosen columns out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..ir import UnsupportedError, type_of
from ..ir.executable import Executable
from .feed import CHUNK
from .gather import gathered

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

CHOSEN = ("draft_tokens", "draft_scores", "draft_logits")
"""Outputs that a function with ``select`` gives of chosen columns only."""


class DraftCache:
    """Runs a function with caches. It knows nothing of what the rows mean; row r holds position r.

    widest: tokens that may be fed at once. Errors: `UnsupportedError` for a function without a
    cache.
    """

    def __init__(self, executable: Executable, function: str) -> None:
        fn = executable.program.function(function)
        if not fn.has_input("past"):
            raise UnsupportedError(
                f"the draft function {function} has no KV cache: run the pass insert_kv_cache "
                f"after the one that makes it"
            )
        self.executable, self.function = executable, function
        self.takes = {str(node.target) for node in fn.inputs}
        self.fetch = tuple(name for name in (*CHOSEN, "hidden") if name in fn.outputs)
        self.widths = executable.widths(function)
        self.widest = CHUNK if self.widths is None else self.widths[-1]

    def run(
        self,
        tokens: Ids,
        positions: Ids,
        past: Sequence[int],
        select: Ids,
        hidden: torch.Tensor | None = None,
        ancestors: Flags | None = None,
        *,
        silent: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Feed tokens i64[B,N] after `past[b]` rows; outputs of the columns `select` i64[B,S].

        hidden: f[B,N,H], if the function takes it. ancestors: bool[B,N,N]; None: a chain. silent:
        only the rows are wanted. What the rows after a sequence's own hold must not matter.
        """
        batch, count = tokens.shape
        width = self._width(count)
        inputs = {
            "tokens": _padded(tokens, width),
            "positions": _padded(positions, width),
            "past": torch.tensor(past, dtype=torch.int64),
            "select": torch.from_numpy(select.copy()),
        }
        if hidden is not None:
            inputs["hidden"] = _wider(hidden, width)
        if ancestors is not None:
            seen = np.broadcast_to(np.eye(width, dtype=np.bool_), (batch, width, width)).copy()
            seen[:, :count, :count] = ancestors
            inputs["ancestors"] = torch.from_numpy(seen)
            self._require_trees()
        rows = max(past) + width
        if rows > self.executable.capacity:
            self.executable.reserve(rows)
        given = {name: tensor for name, tensor in inputs.items() if name in self.takes}
        fetch = () if silent else self.fetch
        outputs = self.executable.run(self.function, given, fetch)
        whole = ("hidden",) if "select" in self.takes else self.fetch
        return {n: gathered(v, select) if n in whole else v for n, v in outputs.items()}

    def blank(self, batch: int, width: int, function: str) -> torch.Tensor:
        """Zeros for a function's input ``hidden``, f[B,W,H]: `width` tokens are fed as W."""
        type = type_of(self.executable.program.function(function).input("hidden"))
        bound = type.bind({"B": batch, "T": self._width(width)})
        return torch.zeros(bound.shape, dtype=bound.dtype)

    def _width(self, count: int) -> int:
        if self.widths is None:
            return count
        return next((width for width in self.widths if width >= count), count)

    def _require_trees(self) -> None:
        if "ancestors" not in self.takes:
            raise UnsupportedError(
                f"the draft function {self.function} takes no ancestors, so it cannot draft trees: "
                f"run the pass accept_trees, or draft a chain"
            )


def _padded(values: Ids, width: int) -> torch.Tensor:
    """i64[B,width], zeros behind the values."""
    padded = np.zeros((len(values), width), dtype=np.int64)
    padded[:, : values.shape[1]] = values
    return torch.from_numpy(padded)


def _wider(hidden: torch.Tensor, width: int) -> torch.Tensor:
    """f[B,width,H], zeros behind the values."""
    if hidden.shape[1] == width:
        return hidden
    return torch.nn.functional.pad(hidden, (0, 0, 0, width - hidden.shape[1]))
