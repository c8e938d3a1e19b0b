"""What the standard says of its ops."""

from __future__ import annotations

from functools import cache

import onnx


@cache
def schema_since(op_type: str, opset: int) -> int | None:
    """The opset that gave one of ONNX's own ops the form that it has in `opset`; None if it is
    not there."""
    if not onnx.defs.has(op_type, max_inclusive_version=opset):
        return None
    return int(onnx.defs.get_schema(op_type, max_inclusive_version=opset).since_version)
