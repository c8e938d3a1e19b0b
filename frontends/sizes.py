"""Symbolic sizes of a trace as `Dim`s over the named symbols ``B`` and ``T``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from ..ir import Dim, InputError, Sym, TensorType, UnsupportedError, make_dim


class Sizes:
    """Translates the SymInts of one trace. names: symbol of the trace -> name in the program.

    limits: the largest value of each name, where it is known.
    """

    def __init__(self, names: Mapping[Any, str], limits: Mapping[str, int]) -> None:
        self.names = {symbol: sympy.Symbol(name) for symbol, name in names.items()}
        self.limits = dict(limits)

    @classmethod
    def of(
        cls, inputs: Sequence[tuple[torch.Tensor, TensorType]], ranges: Mapping[Any, Any]
    ) -> Sizes:
        """Sizes named as in the types of the traced inputs, such as token ids [B,T].

        ranges: of the trace's symbols. Errors: `UnsupportedError` if the trace fixed one of them.
        """
        names: dict[Any, str] = {}
        for traced, type in inputs:
            for size, dim in zip(traced.shape, type.dims, strict=True):
                if not isinstance(dim, Sym):
                    continue
                if not isinstance(size, torch.SymInt):
                    raise UnsupportedError(
                        f"the model runs for {dim} = {size} only; expected any batch B and any "
                        "number of tokens T (a loop over tokens cannot be traced)"
                    )
                names.setdefault(_expr(size), dim.text)
        bounds = {name: ranges[s].upper for s, name in names.items() if s in ranges and name != "B"}
        limits = {name: int(most) for name, most in bounds.items() if most.is_Integer}
        return cls(names, limits)

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
        renamed = sympy.expand(expr.subs(self.names).replace(_is_extremum, self._choose))
        try:
            return make_dim(renamed)
        except InputError as error:
            raise UnsupportedError(
                f"the size {renamed} is no polynomial in the batch and the number of tokens"
            ) from error

    def _choose(self, expr: Any) -> Any:
        """The argument of a Max or Min that is the largest (smallest) for all sizes allowed."""
        sign = 1 if expr.func.__name__ == "Max" else -1
        for chosen in expr.args:
            gaps = [sign * (chosen - other) for other in expr.args]
            if all(self._nonnegative(gap) for gap in gaps):
                return chosen
        return expr

    def _nonnegative(self, expr: Any) -> bool:
        """Whether a linear expression is never negative: it is not at the ends of every range."""
        symbols = sorted(expr.free_symbols, key=str)
        if any(sympy.degree(expr, s) > 1 for s in symbols):
            return False
        ends = [(1, self.limits.get(s.name, 2**30)) for s in symbols]
        corners = itertools.product(*ends)
        return all(expr.subs(dict(zip(symbols, c, strict=True))) >= 0 for c in corners)

    def shape(self, tensor: torch.Tensor) -> list[Dim]:
        """All dims of a traced tensor."""
        return [self.dim(size) for size in tensor.shape]


def _is_extremum(expr: Any) -> bool:
    return expr.func.__name__ in ("Max", "Min")


def _expr(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
