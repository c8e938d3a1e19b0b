"""What the experts of a mixture read on a text, expert by expert.

A router leads each token to a few experts, so that each has moments of its own: sums over the
tokens that chose it alone. Those of all experts may take more memory than the weights do. So what a
mixture reads lies in files, with the experts that each row chose, and experts come in parties,
whose sums take `PARTY` bytes at most, or are those of one expert. The files are read once a party,
and the bits are the same whatever the parties are.

What an expert's second product reads is made by its first one, with its weights as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx
from safetensors import safe_open
from torch import Tensor

from ...ir import arguments
from ...ir.ops.moe import expert_hidden
from .blocks import STACKS, expert_weights
from .moments import Moments, Sums

PARTY = 2**30
"""Bytes that the sums of a party of experts take together."""


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts of a block, and what it read of the text.

    block: its name, for people. node: the call of `graftwork.moe`. names: in the files, of the
    values that it reads [N,H] and of the experts that each row chose, i64[N,K]. weights: the
    block's. tokens: i64[E], how many chose each expert.
    """

    block: str
    node: torch.fx.Node
    names: tuple[str, str]
    files: Sequence[Path]
    weights: Mapping[str, Tensor]
    tokens: Tensor

    @property
    def stacks(self) -> tuple[str, str]:
        """Names of the weights: gate and up of all experts, and down."""
        gate_up, down = expert_weights(self.node)[: len(STACKS)]
        return gate_up, down

    @property
    def is_linear_in_up(self) -> bool:
        """Whether what an expert's second product reads is a multiple of what the up projection
        gives, channel by channel."""
        given = arguments(self.node)
        return all(given[name] is None for name in ("limit", "alpha", "gate_up_bias"))

    def moments(self, experts: Sequence[int]) -> Iterator[tuple[int, tuple[Moments, Moments]]]:
        """Of what the products of these experts read, the gate's and up's and the down's, one
        expert after the other; each was chosen by some token.

        Errors: `PassError` for values that are not finite.
        """
        sizes = [self.weights[name].shape[-1] for name in self.stacks]
        count = max(1, PARTY // (4 * sum(size * size for size in sizes)))
        for start in range(0, len(experts), count):
            sums = {expert: [Sums(size) for size in sizes] for expert in experts[start:][:count]}
            self._add(sums)
            for expert in list(sums):
                read, made = sums.pop(expert)
                said = f"{self.block}: what expert {expert} of %{self.node.name}"
                yield expert, (read.moments(f"{said} reads"), made.moments(f"{said} makes"))

    def _add(self, sums: Mapping[int, Sequence[Sums]]) -> None:
        """Sum up what a party reads of the whole text."""
        for file in self.files:
            with safe_open(file, "pt") as opened:
                rows, chosen = (opened.get_tensor(name) for name in self.names)
            for expert, (read, made) in sums.items():
                own = rows[(chosen == expert).any(-1)]
                if len(own):
                    read.add(own)
                    made.add(self._hidden(expert, own))

    def _hidden(self, expert: int, rows: Tensor) -> Tensor:
        """What an expert makes of rows [N,H] before its last product: [N,F]."""
        given: dict[str, Any] = arguments(self.node)
        weight, bias = (
            None if part is None else self.weights[str(part.target)][expert]
            for part in (given["gate_up"], given["gate_up_bias"])
        )
        assert weight is not None
        how = (given["activation"], given["limit"], given["alpha"])
        return expert_hidden(rows, weight, bias, *how)
