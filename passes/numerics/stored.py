"""How a layer's weight is stored, and what its product becomes.

Most are one weight of few bits. One of several terms has some of the columns in each, which are
picked from what the layer reads::

    %a: f32[B,T,16] = aten.index_select(%h, -1, @up.q4.columns)
    %b: f32[B,T,48] = aten.index_select(%h, -1, @up.q1.columns)
    %y: f32[B,T,96] = quantized_linear(%a, @up.q4, ...) + quantized_linear(%b, @up.q1, ...)

One whose outputs stand in another order, so that those of a run share a codebook, has them picked
from its product: `aten.index_select(%z, -1, @up.outputs)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...ir import TensorType
from ...ir.ops.numerics import Numeric, Quantized
from ...ir.weights import option

I64 = torch.int64


class Stored(NamedTuple):
    """A weight [N,K] as it is stored. terms: of as many columns as their `Form` says. columns:
    which those are, i64 each; none if it is one term. outputs: i64[N], where each output stands
    among the stored ones, if they have another order."""

    terms: tuple[Quantized, ...]
    columns: tuple[Tensor, ...] = ()
    outputs: Tensor | None = None


@option
@dataclass(frozen=True)
class Form:
    """How a weight [N,K] is stored. numerics: a format a term, of different bits. columns: how many
    each has, unless it is one. reordered: outputs stand in another order."""

    numerics: tuple[Numeric, ...]
    columns: tuple[int, ...] = ()
    reordered: bool = False

    def refusal(self, columns: int) -> str:
        """Why rows of so many columns cannot be stored like this; "" if they can."""
        sizes = self.columns or (columns,)
        found = (n.refusal(size) for n, size in zip(self.numerics, sizes, strict=True))
        return next(filter(None, found), "")

    def term_names(self, weight: str, term: int) -> dict[str, str]:
        """Names of a term's parts by the operands that they are, with `columns` if it has some."""
        numeric = self.numerics[term]
        name = f"{weight}.q{numeric.bits}"
        found = {p: name if p == "weight" else f"{name}.{p}" for p in numeric.parts}
        return found | ({"columns": f"{name}.columns"} if self.columns else {})

    def names(self, weight: str) -> tuple[str, ...]:
        """Names of all parts."""
        found = [
            name
            for term in range(len(self.numerics))
            for name in self.term_names(weight, term).values()
        ]
        return (*found, *([f"{weight}.outputs"] if self.reordered else []))

    def types(self, rows: int, columns: int) -> tuple[TensorType, ...]:
        """Their types, in the same order, for a weight of these sizes."""
        found: list[TensorType] = []
        for numeric, size in zip(self.numerics, self.columns or (columns,), strict=True):
            packed, scale = numeric.types(rows, size)
            several = () if numeric.books == 1 else (numeric.books,)
            book = TensorType(torch.float32, (*several, numeric.entries))
            known = {"weight": packed, "scale": scale, "offset": scale, "codebook": book}
            found += [known[part] for part in numeric.parts]
            found += [TensorType(I64, (size,))] if self.columns else []
        return (*found, *([TensorType(I64, (rows,))] if self.reordered else []))

    def tensors(self, stored: Stored) -> tuple[Tensor, ...]:
        """The parts of a stored weight, in the order of `names`."""
        found: list[Tensor | None] = []
        for place, (numeric, term) in enumerate(zip(self.numerics, stored.terms, strict=True)):
            found += [getattr(term, part) for part in numeric.parts]
            found += [stored.columns[place]] if self.columns else []
        found += [stored.outputs] if self.reordered else []
        assert all(part is not None for part in found)
        return tuple(part for part in found if part is not None)

    def of(self, weight: str, parts: Mapping[str, Tensor]) -> Stored:
        """A stored weight of its parts by name."""
        terms, columns = [], []
        for term in range(len(self.numerics)):
            names = self.term_names(weight, term)
            terms.append(Quantized(**{p: parts[n] for p, n in names.items() if p != "columns"}))
            columns += [parts[names["columns"]]] if self.columns else []
        outputs = parts[f"{weight}.outputs"] if self.reordered else None
        return Stored(tuple(terms), tuple(columns), outputs)

    def values(self, stored: Stored) -> Tensor:
        """What it stands for, f32[N,K]."""
        each = [n.dequantize(t) for n, t in zip(self.numerics, stored.terms, strict=True)]
        found = each[0]
        if self.columns:
            found = each[0].new_empty(len(each[0]), sum(self.columns))
            for columns, part in zip(stored.columns, each, strict=True):
                found[:, columns] = part
        return found if stored.outputs is None else found[stored.outputs]
