"""What a method is that chooses the values of quantized weights.

A method is a class in a file of this folder, registered by its decorator; `quantize_weights` finds
it by name. Its fields are its own options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized
from ....ir.support.discovery import Named
from ....ir.support.fields import tuned
from ....ir.weights import option
from ...engine.calibrate import Seen
from ...engine.moments import Moments
from ..stored import Form, Stored


class Method(BaseModel):
    """Base of all methods. reads_text: whether it looks at what products read (`Moments`); one that
    does not is asked weight by weight when weights are loaded, unless text helps it (`text_helps`)
    and the user gives some. windows: of text, if a recipe says no number. quick: it takes no longer
    than reading the weight does."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""
    reads_text: ClassVar[bool] = True
    text_helps: ClassVar[bool] = False
    windows: ClassVar[int] = 64
    quick: ClassVar[bool] = False

    def balanced(
        self, seen: Seen, numerics: Mapping[str, Numeric], fixed: frozenset[str]
    ) -> dict[str, Tensor]:
        """Weights of a block to put in the place of its own, before any is quantized: together they
        compute the same. Those of `numerics` are quantized next, in these formats; `seen.moments`
        follow what changes. fixed: names of weights and states that others read as they are."""
        return {}

    def balanced_expert(
        self, gate_up: Tensor, down: Tensor, moments: Moments, numeric: Numeric
    ) -> tuple[Tensor, Tensor]:
        """Weights f32[2F,H] and f32[H,F] of an expert of a mixture in the place of its own, before
        they are quantized: together they compute the same. moments: of what `down` reads, which is
        a multiple of what the last F rows of `gate_up` give; they follow what changes. numeric: of
        `down`."""
        return gate_up, down

    def prepared(self, moments: Moments) -> Any:
        """What `quantize` needs of the values that products read; worked out once for all of them,
        and the moments are let go. Errors: `PassError` for moments that it cannot use."""
        return moments

    def form(self, numeric: Numeric, rows: int, columns: int) -> Form:
        """How a weight [N,K] is stored, of which a recipe says `numeric`.

        Errors: `InputError` for a format that the method has no use for.
        """
        return Form((numeric,))

    def stored(self, weight: Tensor, form: Form, prepared: Any) -> Stored:
        """A weight f32[N,K] in a form; may write into `weight`."""
        return Stored((self.quantize(weight, form.numerics[0], prepared),))

    def parts(self, weight: Tensor, form: Form, prepared: Any) -> tuple[Tensor, ...]:
        """The tensors of `stored`, in the order of `Form.names`."""
        return form.tensors(self.stored(weight, form, prepared))

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Any) -> Quantized:
        """The same for a form of one format."""
        raise NotImplementedError


T = TypeVar("T", bound=tuple[Tensor | None, ...])


def where_better(better: Tensor, found: T, best: T) -> T:
    """What is of one named tuple of tensors [*S,...] where `better` bool[*S], else of the other."""
    parts = (
        None
        if a is None or b is None
        else torch.where(better.view(*better.shape, *[1] * (a.dim() - better.dim())), a, b)
        for a, b in zip(found, best, strict=True)
    )
    kind: Any = type(best)
    made: T = kind(*parts)
    return made


METHODS: Named[type[Method]] = Named("method")
M = TypeVar("M", bound=type[Method])


def method(cls: M) -> M:
    """Class decorator: make a method known under its name. Errors: `InputError` if another module
    has one of that name."""
    METHODS.add(cls.name, cls, cls.__module__)
    option(cls)
    return cls


def method_of(name: str, tuning: dict[str, Any]) -> Method:
    """A method with its options. Errors: `InputError` naming the methods or options there are."""
    return tuned(METHODS.find(name), name, tuning)
