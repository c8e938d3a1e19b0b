"""JLCM: outputs that are alike share a codebook, which is learned together with who is mapped to
what.

Outputs are ordered by how their values are distributed and cut into runs of a codebook each, so
that no output need say which is its own. Codebooks begin as means of clusters. Then the codebooks
and the mapping move against the gradient of e H e^T, as if the mapping were the identity: a value's
leaning to an entry moves with the slope towards it, the less the farther the entry lies from the
one that it is mapped to, so that the search stays near. A run keeps the best that was seen.

Source: Yvinec et al., "Network Memory Footprint Compression Through Jointly Learnable Codebooks and
Mappings" (2023).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ....ir import InputError
from ....ir.ops.numerics import LOOKED_UP, Numeric, Quantized, nearest, pack
from ...engine.moments import Moments, loss
from ..stored import Form, Stored
from .base import Method, method
from .feedback import Prepared, damped, inverse_factor, mapped_with_feedback

LARGEST = 127.0
"""Of a codebook: products of rounded activations take whole numbers."""

OUTPUTS = 16
"""Of a run at least: those of a kernel's tile."""

QUANTILES = 17
"""By which outputs' distributions are compared."""
LLOYD = 25
"""Rounds of the search for clusters."""


class Learned(NamedTuple):
    """Codes u8[n,K] of a codebook f32[L] of whole numbers, and their loss."""

    codes: Tensor
    book: Tensor
    loss: Tensor


@method
class Jlcm(Method):
    """books: codebooks of a weight, at most. steps: of the descent. rate: of codebooks, as a share
    of their range, and mapping: of the leanings; both fall to 0. damp: as in GPTQ, whose
    feedback finds the mapping that it begins with."""

    books: Annotated[int, Field(ge=1)] = 8
    steps: Annotated[int, Field(ge=0, le=10000)] = 100
    rate: Annotated[float, Field(gt=0)] = 0.002
    mapping: Annotated[float, Field(gt=0)] = 0.1
    damp: Annotated[float, Field(gt=0, le=1)] = 0.01

    name: ClassVar[str] = "jlcm"

    def form(self, numeric: Numeric, rows: int, columns: int) -> Form:
        """Errors: `InputError` for groups, or more than 4 bits."""
        if numeric.group != columns:
            raise InputError(f"expected one scale a row (group: 0), got groups of {numeric.group}")
        if numeric.bits > LOOKED_UP:
            raise InputError(f"expected at most {LOOKED_UP} bits, got {numeric.bits}")
        fitting = (n for n in range(self.books, 0, -1) if rows % (n * OUTPUTS) == 0)
        books = next(fitting, 1)
        return Form((replace(numeric, kind="codebook", books=books),), reordered=books > 1)

    def prepared(self, moments: Moments) -> Prepared:
        """Errors: as `inverse_factor`."""
        hessian = damped(moments.hessian.clone(), self.damp)
        return Prepared(hessian, inverse_factor(moments, self.damp))

    def stored(self, weight: Tensor, form: Form, prepared: Prepared) -> Stored:
        """A weight f32[N,K]; no run's loss is above that of the start."""
        (numeric,) = form.numerics
        scale = numeric.stored(weight.abs().amax(1, keepdim=True) / LARGEST)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        order = alike(weight / scale.float(), numeric.books)
        parts = []
        for run in order.chunk(numeric.books):
            parts.append(self._run(weight[run], scale[run].float(), numeric, prepared))
        codes, books, scales = (torch.cat(found) for found in zip(*parts, strict=True))
        book = books.view(numeric.books, -1) if numeric.books > 1 else books
        term = Quantized(pack(codes, numeric.bits), numeric.stored(scales), None, book)
        return Stored((term,), (), order.argsort() if form.reordered else None)

    def _run(
        self, weight: Tensor, scale: Tensor, numeric: Numeric, prepared: Prepared
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Codes u8[n,K], the codebook f32[L] and scales f32[n,1] of the outputs of a run."""
        hessian = prepared.hessian
        book = clusters(weight / scale, scale.square() * hessian.diagonal(), 2**numeric.bits)
        codes = mapped_with_feedback(weight, prepared.factor, scale, book)

        best = Learned(codes, book.round(), torch.full((), torch.inf))
        leaning = torch.zeros(*weight.shape, len(book))
        leaning.scatter_(-1, codes.long()[..., None], 1.0)
        first, second = torch.zeros_like(book), torch.zeros_like(book)
        for step in range(self.steps + 1):
            mapped, whole = leaning.argmax(-1), book.round()
            error = whole[mapped] * scale - weight
            pull = error @ hessian
            now = Learned(mapped.to(torch.uint8), whole, (pull * error).sum())
            best = now if now.loss < best.loss else best
            share = 1 - step / max(self.steps, 1)
            pull *= scale
            leaning -= self.mapping * share * slopes(pull, book, mapped)
            slope = torch.zeros_like(book).scatter_add_(0, mapped.flatten(), pull.flatten())
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope.square()
            fair = 1 - 0.9 ** (step + 1), 1 - 0.99 ** (step + 1)  # averages began with zeros
            moved = first / fair[0] / ((second / fair[1]).sqrt() + 1e-12)
            book = (book - 2 * LARGEST * self.rate * share * moved).clamp(-LARGEST, LARGEST)
        return best.codes, best.book, rescaled(weight, best, scale, numeric, hessian)


def alike(values: Tensor, books: int) -> Tensor:
    """The order i64[N] in which outputs whose values f32[N,K] are distributed alike stand together:
    along the direction in which their quantiles differ most."""
    if books == 1:
        return torch.arange(len(values))
    quantiles = values.sort(-1).values[:, torch.linspace(0, values.shape[1] - 1, QUANTILES).long()]
    centred = quantiles - quantiles.mean(0)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[0]
    direction = direction * torch.sign(direction[direction.abs().argmax()])
    order: Tensor = (centred @ direction).argsort(stable=True)
    return order


def clusters(values: Tensor, weights: Tensor, count: int) -> Tensor:
    """Means f32[count], ascending, of clusters of values by their weights, from even quantiles."""
    flat, by = values.flatten(), weights.expand_as(values).flatten()
    ranked = flat.sort().values
    places = (torch.arange(count) + 0.5) / count * (len(ranked) - 1)
    found = ranked[places.long()]
    for _ in range(LLOYD):
        mapping = nearest(flat, found).long()
        mass = torch.zeros(count).scatter_add_(0, mapping, by)
        sums = torch.zeros(count).scatter_add_(0, mapping, by * flat)
        found = torch.where(mass > 0, sums / mass.clamp(min=1e-30), found).sort().values
    return found


def slopes(pull: Tensor, book: Tensor, codes: Tensor) -> Tensor:
    """Of the leanings f32[n,K,L] of values, which the slopes `pull` f32[n,K] of their entries give:
    towards each entry, over its distance."""
    way = book - book[codes][..., None]
    near = way.abs().clamp(min=1e-6)
    closeness = torch.where(way == 0, 0.0, way.sign() / near * _gap(book))
    size = pull.abs().mean(-1, keepdim=True).clamp(min=1e-30)
    found: Tensor = (pull / size)[..., None] * closeness
    return found


def _gap(book: Tensor) -> Tensor:
    """The mean distance of neighbours."""
    spread: Tensor = (book.max() - book.min()).clamp(min=1e-6)
    return spread / max(len(book) - 1, 1)


def rescaled(
    weight: Tensor, learned: Learned, scale: Tensor, numeric: Numeric, hessian: Tensor
) -> Tensor:
    """The best scales f32[n,1] for what was learned, where they are better as they are stored."""
    values = learned.book[learned.codes.long()]
    pulled = values @ hessian
    best = (pulled * weight).sum(-1, keepdim=True) / (pulled * values).sum(-1, keepdim=True)
    best = torch.where(torch.isfinite(best) & (best > 0), best, scale)
    stored = numeric.stored(best).float()
    before, after = (loss(values * s - weight, hessian)[:, None] for s in (scale, stored))
    return torch.where(after < before, stored, scale)
