"""Rotations of keys that move, and of queries that are to look at them, in what drops rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ir import Function, PassError, Program, type_of
from .cached_rows import Written
from .rotation import Rotation

G = torch.ops.graftwork


@dataclass
class Rotations:
    """Of a program's layers, in the function `fn` that drops rows `block` by block. refuse: raises
    where its first argument holds."""

    fn: Function
    program: Program
    block: int
    refuse: Callable[[bool, str], None]

    def turned(self, write: Written, taken: torch.fx.Node, rows: torch.fx.Node) -> torch.fx.Node:
        """Keys as the rotation would have made them at their new places."""
        wrong = "" if _is_rotated(write.keys.new) else "not what a rotation gives"
        wrong = "stored in few bits" if write.how else wrong
        self.refuse(
            bool(wrong),
            f"positions='cache' turns keys to their new places, and those of {write.what} are "
            f"{wrong}: use positions='absolute'",
        )
        cos, sin, inner = self._tables(write, write.keys.new, "positions='cache'")
        return self.fn.call(G.turn_rows.default, taken, rows, cos, sin, interleaved=inner)

    def of_queries(
        self, write: Written, what: str, reach: int
    ) -> tuple[torch.fx.Node | None, torch.fx.Node | None, bool]:
        """The tables of what rotates queries, and how; none where nothing does. what: wants so many
        positions of them."""
        asked = write.attend.args[0]
        self.refuse(
            _is_rotated(write.keys.new) and not _is_rotated(asked),
            f"the queries of {write.what} are not what a rotation gives, and its keys are: where "
            f"queries will look is not known",
        )
        if not _is_rotated(asked):
            return None, None, False
        cos, sin, inner = self._tables(write, asked, what)
        known = int(str(type_of(cos).dims[0]))
        self.refuse(
            reach > known,
            f"{what} and block={self.block} look {reach} positions far, and the "
            f"rotations of {write.what} are known for {known}",
        )
        return cos, sin, inner

    def _tables(
        self, write: Written, rotated: Any, what: str
    ) -> tuple[torch.fx.Node, torch.fx.Node, bool]:
        """The tables of a rotation's angles, one row a position. what: wants them."""
        rotation = Rotation.of(rotated)
        if rotation is None:
            raise PassError(
                f"evict_cache: {what} needs the angles of {write.what} as tables: run the pass "
                f"tabulate_positions before, or leave the option out"
            )
        cos, sin = rotation.tables(self.fn, self.program)
        return cos, sin, rotation.interleaved


def _is_rotated(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is G.rotary.default
