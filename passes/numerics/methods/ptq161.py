"""PTQ1.61: a fifth of the input channels in four bits, the others as signs around a mean.

Channels that the text makes large are salient, and weights of theirs keep four bits. Of the others
w becomes s * sign(w - m) + m, with s and m a row. Which channels are salient is known once a layer,
for all of its rows, and costs next to nothing. The scales and offsets of both parts of a row are
then solved for together, so that e H e^T of the whole row is least, and signs chosen anew, in
turns; a row is changed only where that makes its loss less.

Source: Zhao et al., "PTQ1.61: Push the Real Limit of Extremely Low-Bit Post-Training Quantization
Methods for Large Language Models" (2025).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ....ir import InputError
from ....ir.ops.numerics import Numeric, Quantized, pack
from ...engine.moments import Moments, loss
from ..stored import Form, Stored
from .base import Method, method, where_better
from .feedback import damped, solved

UNIT = 16
"""Salient channels come in as many, so that kernels have whole blocks."""


@method
class Ptq161(Method):
    """salient: the share of input channels that keep the recipe's bits. rounds: how often scales
    and signs are solved for in turns. damp: as in GPTQ."""

    salient: Annotated[float, Field(gt=0, lt=1)] = 0.2
    rounds: Annotated[int, Field(ge=0, le=100)] = 8
    damp: Annotated[float, Field(gt=0, le=1)] = 0.01

    name: ClassVar[str] = "ptq161"

    def form(self, numeric: Numeric, rows: int, columns: int) -> Form:
        """Errors: `InputError` for groups, one bit, or too few columns."""
        if numeric.group != columns:
            raise InputError(f"expected one scale a row (group: 0), got groups of {numeric.group}")
        if numeric.bits == 1:
            raise InputError("expected more than 1 bit for salient channels")
        kept = max(UNIT, round(columns * self.salient / UNIT) * UNIT)
        if kept >= columns:
            raise InputError(f"expected more than {UNIT} columns, got {columns}")
        salient = replace(numeric, group=kept, kind="affine")
        others = replace(salient, bits=1, group=columns - kept)
        return Form((salient, others), (kept, columns - kept))

    def prepared(self, moments: Moments) -> Moments:
        """Second derivatives, damped as in GPTQ."""
        damped(moments.hessian, self.damp)
        return moments

    def stored(self, weight: Tensor, form: Form, prepared: Moments) -> Stored:
        """A weight f32[N,K]; its loss falls from round to round, row by row."""
        order = prepared.magnitude.argsort(descending=True, stable=True)
        columns = tuple(part.sort().values for part in order.split(form.columns))
        steps = _first_steps(weight, form, columns)
        best = _solved(weight, steps, form, columns, prepared.hessian)
        least = loss(weight - form.values(_stored(best, form, columns)), prepared.hessian)
        for _ in range(self.rounds):
            steps = _nearest(weight, best, form, columns)
            found = _solved(weight, steps, form, columns, prepared.hessian)
            now = loss(weight - form.values(_stored(found, form, columns)), prepared.hessian)
            better = now < least
            if not better.any():
                break
            both = zip(found, best, strict=True)
            best = tuple(where_better(better, new, old) for new, old in both)
            least = torch.minimum(now, least)
        return _stored(best, form, columns)


class Term(NamedTuple):
    """Whole numbers f32[N,k], a scale and an offset f32[N,1]."""

    steps: Tensor
    scale: Tensor
    offset: Tensor


def _first_steps(weight: Tensor, form: Form, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Salient weights to the nearest step between their least and largest, signs of the others."""
    salient, others = (weight[:, part] for part in columns)
    scale, offset = form.numerics[0].scales(salient[:, None])
    return (
        form.numerics[0].steps(salient, scale, offset),
        (others > others.mean(1, keepdim=True)).float(),
    )


def _solved(
    weight: Tensor,
    steps: tuple[Tensor, ...],
    form: Form,
    columns: tuple[Tensor, ...],
    hessian: Tensor,
) -> tuple[Term, ...]:
    """Scales and offsets that make each row's loss least, of the numbers that its values have."""
    features = []
    for number, part in zip(steps, columns, strict=True):
        for values in (number, torch.ones_like(number)):
            feature = torch.zeros_like(weight)
            feature[:, part] = values
            features.append(feature)
    pulled = [feature @ hessian for feature in features]
    matrix = torch.stack([torch.stack([(p * f).sum(-1) for f in features], -1) for p in pulled], -2)
    wanted = torch.stack([(p * weight).sum(-1) for p in pulled], -1).double()
    best = solved(matrix.double(), wanted).float()
    found = []
    for place, (numeric, number) in enumerate(zip(form.numerics, steps, strict=True)):
        scale, offset = best[:, 2 * place : 2 * place + 1], best[:, 2 * place + 1 :][:, :1]
        found.append(Term(number, numeric.stored(scale).float(), numeric.stored(offset).float()))
    return tuple(found)


def _nearest(
    weight: Tensor, best: tuple[Term, ...], form: Form, columns: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The numbers nearest to a weight by the scales that it has."""
    return tuple(
        numeric.steps(weight[:, part], scale, offset)
        for numeric, part, (_, scale, offset) in zip(form.numerics, columns, best, strict=True)
    )


def _stored(best: tuple[Term, ...], form: Form, columns: tuple[Tensor, ...]) -> Stored:
    terms = [
        Quantized(
            pack(steps.to(torch.uint8), numeric.bits), numeric.stored(scale), numeric.stored(offset)
        )
        for numeric, (steps, scale, offset) in zip(form.numerics, best, strict=True)
    ]
    return Stored(tuple(terms), columns)
