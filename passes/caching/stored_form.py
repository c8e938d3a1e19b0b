"""How older rows of a cache are stored in few bits: the nodes that store them, and read them.

A form with everything, of keys before their rotation (`turned`, `outliers`, `rank`)::

    %u: f32[B,G,64,64] = graftwork.rotary(%oldest, %cos, %minus_sin)        # as before the rotation
    %x: f32[B,G,64,64] = graftwork.hadamard_rows(%u)
    %q: (u8[B,G,64,16], f16[B,G,1,256]) = graftwork.quantize_groups(%x, bits=2, group=64,
        by_channel=True, outliers=1)
    %e: f32[B,G,64,64] = aten.sub(%x, graftwork.group_values(%q.0, %q.1, ...))
    %f: (f16[B,G,64,2], f16[B,G,1,128]) = graftwork.low_rank(%e, group=64, rank=2)

and attention takes them the same way back, see `graftwork.attend_grouped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, State, Sym, TensorType
from .rotation import Rotation

A, G = torch.ops.aten, torch.ops.graftwork
CODES, STEPS, LEFT, RIGHT = "codes", "steps", "left", "right"

Node = torch.fx.Node


def bits_remark(bits: int, caches: Sequence[State], parts: Iterable[State], group: int = 1) -> str:
    """What numbers of caches [B,G,C,D] take that have codes, with all that is kept beside those.

    parts: the states that hold the codes and the rest; those with another capacity than the caches
    have a row for `group` rows of a text.

    >>> made = {"key": "f32[B,2,C,64]", "codes": "u8[B,2,C,16]", "steps": "f16[B,2,C.2,128]"}
    >>> key, *parts = [State(n, TensorType.parse(text), 0, n) for n, text in made.items()]
    >>> bits_remark(2, [key], parts, 32)
    'codes of 2 bits take 3.00 bits a number with the steps and all else that is kept beside them'
    """

    def numbers(state: State) -> int:
        return math.prod(dim for dim in state.type.dims if isinstance(dim, int))

    own = {cache.capacity for cache in caches}
    stored = sum(
        8 * part.type.dtype.itemsize * numbers(part) / (1 if part.capacity in own else group)
        for part in parts
    )
    mean = stored / sum(map(numbers, caches))
    return (
        f"codes of {bits} bits take {mean:.2f} bits a number with the steps and all else that is "
        f"kept beside them"
    )


@dataclass(frozen=True)
class StoredForm:
    """bits, group, by_channel, outliers: as in `quantize_groups`. rank: of what is kept of what the
    codes leave out. turned: whether rows are turned by a Hadamard matrix first. rotation: what
    keys are taken back from before they are stored."""

    bits: int
    group: int
    by_channel: bool
    outliers: int
    rank: int
    turned: bool
    rotation: Rotation | None

    @property
    def how(self) -> dict[str, Any]:
        """Of the ops with codes."""
        how: dict[str, Any] = {"bits": self.bits, "group": self.group}
        how["by_channel"] = self.by_channel
        return how | ({"outliers": self.outliers} if self.outliers else {})

    def parts(self, rows: TensorType, groups: str) -> dict[str, TensorType]:
        """What is stored of rows [B,G,C,D]. groups: the capacity of what several rows share."""
        *outer, capacity, width = rows.dims
        assert isinstance(width, int)
        shared = Sym(groups)
        each = width if self.by_channel else width // min(self.group, width)
        numbers = (2 + 2 * self.outliers) * each
        parts = {
            CODES: TensorType(torch.uint8, (*outer, capacity, width * self.bits // 8)),
            STEPS: TensorType(
                torch.float16, (*outer, shared if self.by_channel else capacity, numbers)
            ),
        }
        if self.rank:
            parts[LEFT] = TensorType(torch.float16, (*outer, capacity, self.rank))
            parts[RIGHT] = TensorType(torch.float16, (*outer, shared, self.rank * width))
        return parts

    def store(
        self, fn: Function, program: Program, rows: Node, first: Node, count: int
    ) -> dict[str, tuple[Node, int]]:
        """Whole groups of rows in their parts, and how many rows each row of a part stands for.

        rows f[B,G,count,D], which begin at the text's row `first` i64[B].
        """
        if self.rotation is not None:
            index = fn.call(A.arange.start_step, 0, count)
            places = fn.call(A.add.Tensor, fn.call(A.unsqueeze.default, first, 1), index)
            rows = self.rotation.undone(fn, program, rows, places)
        if self.turned:
            rows = fn.call(G.hadamard_rows.default, rows)
        made = fn.call(G.quantize_groups.default, rows, **self.how)
        codes, steps = fn.item(made, 0), fn.item(made, 1)
        parts = {CODES: (codes, 1), STEPS: (steps, self.group if self.by_channel else 1)}
        if self.rank:
            back = fn.call(G.group_values.default, codes, steps, **self.how)
            error = fn.call(A.sub.Tensor, rows, back)
            made = fn.call(G.low_rank.default, error, group=self.group, rank=self.rank)
            parts |= {LEFT: (fn.item(made, 0), 1), RIGHT: (fn.item(made, 1), self.group)}
        return parts
