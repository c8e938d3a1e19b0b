"""Rotations of keys by position, found where they are, done again elsewhere, and undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, type_of

A, G = torch.ops.aten, torch.ops.graftwork


def _looked_up(node: Any) -> torch.fx.Node | None:
    """The look-up, in a table with a row a position, that gives a rotation's angles."""
    while node.target in (A.reshape.default, A.view.default, A.unsqueeze.default):
        node = node.args[0]
    found = node.target is A.embedding.default and node.args[0].op == "get_attr"
    return node if found else None


@dataclass(frozen=True)
class Rotation:
    """cos, sin: names of weights [P,R], a row a position; interleaved as in `rotary`."""

    cos: str
    sin: str
    interleaved: bool

    @classmethod
    def of(cls, rotated: Any, positions: torch.fx.Node | None = None) -> Rotation | None:
        """What has rotated these rows, for these positions if some are given; None where nothing
        that can be done again did."""
        if not isinstance(rotated, torch.fx.Node) or rotated.target is not G.rotary.default:
            return None
        found = [_looked_up(angles) for angles in rotated.args[1:3]]
        if any(node is None or positions not in (None, node.args[1]) for node in found):
            return None
        cos, sin = (str(node.args[0].target) for node in found)  # type: ignore[union-attr]
        return cls(cos, sin, bool(rotated.kwargs.get("interleaved", False)))

    def tables(self, fn: Function, program: Program) -> list[torch.fx.Node]:
        """`cos` and `sin`, for a function to read."""
        return [fn.weight(program.weights[name]) for name in (self.cos, self.sin)]

    def done(
        self, fn: Function, program: Program, rows: torch.fx.Node, places: torch.fx.Node
    ) -> torch.fx.Node:
        """rows f[B,G,T,D], rotated for the positions i64[B,T] or [1,T]; those beyond the table as
        its last one."""
        cos, sin = self.angles(fn, program, places)
        return fn.call(G.rotary.default, rows, cos, sin, interleaved=self.interleaved)

    def undone(
        self, fn: Function, program: Program, rows: torch.fx.Node, places: torch.fx.Node
    ) -> torch.fx.Node:
        """rows as they were before. Tables may be scaled: what is undone has its length again."""
        cos, sin = self.angles(fn, program, places)
        squares = [fn.call(A.mul.Tensor, angles, angles) for angles in (cos, sin)]
        size = fn.call(A.add.Tensor, *squares)
        back = fn.call(A.div.Tensor, cos, size)
        minus = fn.call(A.neg.default, fn.call(A.div.Tensor, sin, size))
        return fn.call(G.rotary.default, rows, back, minus, interleaved=self.interleaved)

    def angles(self, fn: Function, program: Program, places: torch.fx.Node) -> list[torch.fx.Node]:
        """cos and sin f32[B,T,R] of positions i64[B,T]; those beyond the table as its last one."""
        tables = self.tables(fn, program)
        last = int(str(type_of(tables[0]).dims[0])) - 1
        within = fn.call(A.clamp.default, places, 0, last)
        return [fn.call(A.embedding.default, table, within) for table in tables]
