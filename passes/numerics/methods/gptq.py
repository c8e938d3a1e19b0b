"""GPTQ: rounding that makes up for its own errors, by the second derivatives of the products'.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers" (2022).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized
from ...engine.moments import Moments
from .base import Method, method
from .feedback import Factor, Scales, inverse_factor, round_with_feedback
from .least_squares import LeastSquares, importance


class Prepared(NamedTuple):
    """How much each channel counts f32[K], and the second derivatives' factor."""

    used: Tensor
    factor: Factor


@method
class Gptq(Method):
    """damp: added to the diagonal of the second derivatives, as a share of its mean. fitted: scales
    and offsets are those of `least_squares`; if not, as in the paper, those of a group's range.

    Columns are taken in their order, scales of a group when it is reached, of its values as they
    are then. As in the paper's code, the values of a column that is zero on all of the text become
    as near to zero as the group's scale allows.
    """

    damp: Annotated[float, Field(gt=0, le=1)] = 0.01
    fitted: bool = True

    name: ClassVar[str] = "gptq"

    def prepared(self, moments: Moments) -> Prepared:
        """Errors: as `inverse_factor`."""
        return Prepared(importance(moments.hessian.diagonal()), inverse_factor(moments, self.damp))

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Prepared) -> Quantized:
        """See `round_with_feedback`."""

        def taken(values: Tensor, column: int) -> Scales:
            used = prepared.used[column : column + numeric.group]
            scale, offset, _ = LeastSquares().fitted(values, used, numeric)
            return scale, offset

        found = taken if self.fitted else None
        return round_with_feedback(weight, prepared.factor, numeric, found)
