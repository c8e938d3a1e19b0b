"""Symbolic sizes of a trace as `Dim`s over the named symbols ``B`` and ``T``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from ..ir import Dim, InputError, UnsupportedError, make_dim


class Sizes:
    """Translates the SymInts of one trace. names: symbol of the trace -> name in the program."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = {symbol: sympy.Symbol(name) for symbol, name in names.items()}

    @classmethod
    def of(cls, tokens: torch.Tensor) -> Sizes:
        """Sizes named after the dims of the traced token ids [B,T]."""
        dims = zip(tokens.shape, ("B", "T"), strict=True)
        return cls({_expr(size): name for size, name in dims if isinstance(size, torch.SymInt)})

    def dim(self, size: int | torch.SymInt) -> Dim:
        """One size. Errors: `UnsupportedError` if it depends on data or is no polynomial."""
        if isinstance(size, int):
            return size
        expr = _expr(size)
        unknown = [str(s) for s in expr.free_symbols if s not in self.names]
        if unknown:
            raise UnsupportedError(
                f"the size {expr} depends on the values of tensors ({', '.join(unknown)}); "
                "expected sizes that follow from the batch and the number of tokens"
            )
        renamed = sympy.expand(expr.subs(self.names))
        try:
            return make_dim(renamed)
        except InputError as error:
            raise UnsupportedError(
                f"the size {renamed} is no polynomial in the batch and the number of tokens"
            ) from error

    def shape(self, tensor: torch.Tensor) -> list[Dim]:
        """All dims of a traced tensor."""
        return [self.dim(size) for size in tensor.shape]

    def value(self, item: Any) -> Any:
        """A traced argument with its symbolic integers translated, also inside lists."""
        if isinstance(item, torch.SymInt):
            return self.dim(item)
        if isinstance(item, Sequence) and not isinstance(item, str):
            return [self.value(part) for part in item]
        return item


def _expr(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
