"""What a method is that chooses the values of quantized weights.

A method is a class in a file of this folder, registered by its decorator; `quantize_weights` finds
it by name. Its fields are its own options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ....ir import InputError
from ....ir.ops.numerics import Numeric, Quantized
from ....ir.support.discovery import import_all
from ....ir.weights import option
from ...engine.calibrate import Seen
from ...engine.moments import Moments
from ..stored import Form, Stored


class Method(BaseModel):
    """Base of all methods. reads_text: whether it looks at what products read (`Moments`); one that
    does not is asked weight by weight when weights are loaded. quick: it takes no longer than
    reading the weight does."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""
    reads_text: ClassVar[bool] = True
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

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Any) -> Quantized:
        """The same for a form of one format."""
        raise NotImplementedError


_METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def method(cls: M) -> M:
    """Class decorator: make a method known under its name. Errors: `InputError` naming both methods
    if another one has that name."""
    known = _METHODS.setdefault(cls.name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        here, there = (f"{c.__module__}.{c.__qualname__}" for c in (cls, known))
        raise InputError(f"{here} and {there} are both methods called {cls.name!r}: rename one")
    _METHODS[cls.name] = cls
    option(cls)
    return cls


def known_methods() -> dict[str, type[Method]]:
    """Every method by name."""
    import_all(__package__)
    return dict(sorted(_METHODS.items()))


def method_of(name: str, options: dict[str, Any]) -> Method:
    """A method with its options. Errors: `InputError` naming the methods or options there are."""
    known = known_methods()
    if name not in known:
        raise InputError(f"method: no method is called {name!r}; there are {', '.join(known)}")
    fields = known[name].model_fields
    try:
        return known[name](**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"tuning: {name} takes {', '.join(sorted(fields)) or 'no options'}; "
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error
