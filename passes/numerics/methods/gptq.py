"""GPTQ: rounding that makes up for its own errors, by the second derivatives of the products'.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022).
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized
from ...engine.moments import Moments
from .base import Method, method
from .feedback import Factor, inverse_factor, round_with_feedback


@method
class Gptq(Method):
    """damp: added to the diagonal of the second derivatives, as a share of its mean.

    Columns are taken in their order, scales of a group when it is reached, from its values as they
    are then. As in the paper's code, the values of a column that is zero on all of the text become
    as near to zero as the group's scale allows.
    """

    damp: Annotated[float, Field(gt=0, le=1)] = 0.01

    name: ClassVar[str] = "gptq"

    def prepared(self, moments: Moments) -> Factor:
        """See `inverse_factor`."""
        return inverse_factor(moments, self.damp)

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Factor) -> Quantized:
        """See `round_with_feedback`."""
        return round_with_feedback(weight, prepared, numeric)
