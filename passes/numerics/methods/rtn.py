"""Round to nearest."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ....ir.ops.numerics import Numeric, Quantized
from .base import Method, method


@method
class RoundToNearest(Method):
    """Every value becomes the nearest that its group's scale allows; no text is needed."""

    name: ClassVar[str] = "rtn"
    reads_text: ClassVar[bool] = False
    quick: ClassVar[bool] = True

    def quantize(self, weight: Tensor, numeric: Numeric, prepared: Any) -> Quantized:
        return numeric.quantize(weight)
