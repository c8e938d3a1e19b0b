"""Which axes of a call's inputs what is compiled may take any size of."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...ir import Function, Sym, type_of
from ...ir.execution.executable import Widths

WIDTH, CHOSEN = Sym("T"), Sym("S")
TOGETHER = {WIDTH: Sym("N"), CHOSEN: Sym("M")}
"""The same of all sequences of a batch, packed."""


class OpenAxes:
    """Of a function's inputs those axes that are a step's tokens, or the chosen ones of them.

    widths: how many tokens steps of the function feed.
    """

    def __init__(self, function: Function, widths: Widths) -> None:
        self.widths = widths
        dims = {str(node.target): type_of(node).dims for node in function.inputs}
        self.places = {
            symbol: {
                name: frozenset(axis for axis, dim in enumerate(found) if dim == symbol)
                for name, found in dims.items()
            }
            for symbol in (WIDTH, CHOSEN, *TOGETHER.values())
        }

    def of(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, frozenset[int]]:
        """By input: none where a step of this width is compiled by itself. So is one chosen token,
        since most prompts choose one."""
        width, symbols = self._size(WIDTH, inputs), []
        if self.widths.more and width is not None and width not in self.widths.each:
            symbols = [WIDTH, CHOSEN] if (self._size(CHOSEN, inputs) or 1) > 1 else [WIDTH]
        return {
            name: frozenset().union(
                *(self.places[kind][name] for s in symbols for kind in (s, TOGETHER[s]))
            )
            for name in inputs
        }

    def _size(self, symbol: Sym, inputs: Mapping[str, torch.Tensor]) -> int | None:
        found = self.places[symbol]
        sizes = (inputs[name].shape[axis] for name in inputs for axis in found[name])
        return next(sizes, None)
