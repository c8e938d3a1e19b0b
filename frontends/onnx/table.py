"""The table of ONNX ops: each a function from values to values, in torch's and graftwork's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as oir
import torch

from ...ir import UnsupportedError
from ..stored_weights import StoredWeight
from .values import Parameter, Value

DTYPES = {
    oir.DataType.FLOAT: torch.float32,
    oir.DataType.DOUBLE: torch.float64,
    oir.DataType.INT64: torch.int64,
    oir.DataType.INT32: torch.int32,
    oir.DataType.INT8: torch.int8,
    oir.DataType.UINT8: torch.uint8,
    oir.DataType.BOOL: torch.bool,
}


@dataclass
class Context:
    """What ops may ask for besides their inputs.

    positions: i64[B,T] of the tokens. dtype: of the model's floats. store: gives the float weight
    of sizes [N,K] that stands for one which is kept in few bits, and which the function reads.
    """

    node: oir.Node
    positions: torch.Tensor
    dtype: torch.dtype
    store: Callable[[str, tuple[int, int], Callable[[], StoredWeight]], Parameter]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def name_of(self, index: int) -> str:
        """The name of an input of the node."""
        value = self.node.inputs[index]
        return "" if value is None else str(value.name)

    def float(self, code: int) -> torch.dtype:
        """A dtype by its number; half precisions are the model's own.

        Errors: `UnsupportedError` for one that programs have not."""
        kind = oir.DataType(code)
        if kind in (oir.DataType.FLOAT16, oir.DataType.BFLOAT16):
            return self.dtype
        if kind not in DTYPES:
            raise UnsupportedError(f"the dtype {kind.name} is not supported yet")
        return DTYPES[kind]


Op = Callable[..., Any]
OPS: dict[tuple[str, str], Op] = {}
"""By domain ("" or "com.microsoft") and name."""

MICROSOFT = "com.microsoft"


def op(*names: str, domain: str = "") -> Callable[[Op], Op]:
    """Decorator: the function is what these ops mean. It takes a `Context` and the inputs; None
    stands for one that is left out."""

    def enter(function: Op) -> Op:
        OPS.update({(domain, name): function for name in names})
        return function

    return enter


def run(context: Context, inputs: list[Value]) -> Any:
    """The value, or values, of a node. Errors: `UnsupportedError` naming an op that is not known,
    or what of it is not, or that its inputs do not fit."""
    node = context.node
    function = OPS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    named = node.name or (node.outputs[0].name if node.outputs else "")
    where = f"node {named} ({node.op_type})"
    if function is None:
        raise UnsupportedError(f"{where}: the op is not supported yet")
    try:
        return function(context, *inputs)
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    except Exception as error:  # whatever torch, numpy and sympy raise of operands that do not fit
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UnsupportedError(f"{where}: what it is given does not fit: {said}") from error
