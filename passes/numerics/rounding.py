"""What passes that store weights in few bits have in common: how a weight's values are chosen."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from ...ir import InputError
from ..engine.base import STATES, Contract, Effect, LearningPass
from .methods.base import Method, method_of

Bits = Literal[2, 3, 4, 6, 8]
SPAN = 32
"""Activations that share a scale. Real models have a few channels many times as large as the
others, and with a scale a row those cost all others their bits."""

SCALES = {"f16": torch.float16, "f32": torch.float32}


class Rounding(LearningPass):
    """See `QuantizeWeights`."""

    group: Annotated[int, Field(ge=0)] = 32
    method: str = "rtn"
    tuning: dict[str, bool | int | float] = Field(default_factory=dict)
    scales: Literal["f16", "f32"] = "f16"
    embedding: bool | Bits = False
    exclude: tuple[str, ...] = ()
    rounded: bool = True
    span: Annotated[int, Field(ge=0)] = SPAN

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"quantized"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}

    @model_validator(mode="after")
    def _has_a_method(self) -> Rounding:
        try:
            method_of(self.method, self.tuning)
        except InputError as error:  # options are refused as what is wrong with a value
            raise ValueError(str(error)) from error
        return self

    @property
    def chooser(self) -> Method:
        """The method, with its options."""
        return method_of(self.method, self.tuning)
