"""How older rows of a cache are stored in few bits: the nodes that store them, and read them.

A form with everything, of keys before their rotation (`turned`, `outliers`, `rank`)::

    %u: f32[B,G,64,64] = graftwork.rotary(%oldest, %cos, %minus_sin)        # as before the rotation
    %x: f32[B,G,64,64] = graftwork.hadamard_rows(%u)
    %s: (u8[B,G,C,16], f16[B,G,C.2,256], f32[B,G,C.1,64]) = graftwork.store_groups(%codes, %steps,
        %recent, %x, %past, bits=2, group=64, by_channel=True, after=192, outliers=1)
    %f: (f16[B,G,C,2], f16[B,G,C.2,128]) = graftwork.store_factors(%left, %right, %x, %past, bits=2,
        group=64, by_channel=True, after=192, outliers=1)

and attention takes them the same way back, see `graftwork.attend_grouped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ...ir import Function, Program, State, Sym, TensorType
from .rotation import Rotation

A, G = torch.ops.aten, torch.ops.graftwork
CODES, STEPS, LEFT, RIGHT, RECENT = "codes", "steps", "left", "right", "recent"

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

    def stored(self, fn: Function, program: Program, rows: Node, first: Node, count: int) -> Node:
        """Rows f[B,G,count,D] as they are stored, from the text's row `first` i64[B] on."""
        if self.rotation is not None:
            index = fn.call(A.arange.start_step, 0, count)
            places = fn.call(A.add.Tensor, fn.call(A.unsqueeze.default, first, 1), index)
            rows = self.rotation.undone(fn, program, rows, places)
        return fn.call(G.hadamard_rows.default, rows) if self.turned else rows

    def store(
        self, fn: Function, rows: Node, past: Node, after: int, given: Mapping[str, Node]
    ) -> dict[str, Node]:
        """What becomes of the parts, and of the latest rows, when whole groups are stored.

        rows: from `stored`. given: by part. The latest rows move up only when `rows` are known.
        """
        how = {**self.how, "after": after}
        taken = [given[part] for part in (CODES, STEPS, RECENT)]
        made = fn.call(G.store_groups.default, *taken, rows, past, **how)
        parts = {part: fn.item(made, n) for n, part in enumerate((CODES, STEPS, RECENT))}
        if self.rank:
            sides = [given[part] for part in (LEFT, RIGHT)]
            made = fn.call(G.store_factors.default, *sides, rows, past, **how)
            parts |= {part: fn.item(made, n) for n, part in enumerate((LEFT, RIGHT))}
        return parts
