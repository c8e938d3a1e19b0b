"""The graftwork op set. An op is one decorated function: declaration, docstring, meaning, samples.

`op` registers the function as ``torch.ops.graftwork.<name>``. Its body is the reference semantics
and the decomposition that backends inline. Schema, checks, result types, text form, documentation
and generic tests derive from this block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..support.discovery import import_all
from ..support.errors import InputError
from .declared import Also, Declared, declare, parts

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of one call, with small concrete tensors."""


Options = Mapping[str, Any]
"""Keyword arguments of a call."""


@dataclass(frozen=True)
class Product:
    """An op that multiplies rows x [...,K] by the transpose of a weight [N,K].

    stored: arguments with N as their first axis, the weight first. Products of one x merge by
    concatenating these; their other arguments must be equal. inner: how many of `stored`, from the
    first, must agree in all other axes. exact: whether a call rounds x to integers and sums them
    exactly: a row's result then does not depend on other rows, and float error in x can grow to a
    rounding step.
    """

    stored: tuple[str, ...]
    inner: int
    exact: Callable[[Options], bool] = lambda options: False


@dataclass(frozen=True)
class Native:
    """A kernel of `backends/kernels` for an op, on float32 operands.

    sizes: letters of the declaration that are passed to the kernel, in order; those of operands
    that are absent as 0. cast: floating operands, by name, that torch converts to float32 first;
    other dtypes elsewhere run the op's meaning. Floating options that are None are passed as 0.
    """

    sizes: str
    cast: str = ""


@dataclass(frozen=True)
class OpDef:
    """One op. operands: its declaration. declared: derived from it. stored: operands that are
    weights of few bits, see `ir.rewrite.stored`."""

    name: str
    operands: str
    declared: Declared
    meaning: Callable[..., Any]
    samples: Callable[[], Iterator[Sample]]
    overload: Any
    product: Product | None = None
    native: Native | None = None
    stored: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        """The meaning's docstring."""
        return (self.meaning.__doc__ or "").strip()

    @property
    def row(self) -> str:
        """The op's row in docs/ops.md: name, declaration, and first paragraph of its docstring."""
        text = self.operands.replace(", also", "").replace("also ", "").replace("|", "\\|")
        first = " ".join(self.doc.partition("\n\n")[0].split())
        return f"| `{self.name}` | `{text}` | {first} |"


_LIBRARY = torch.library.Library("graftwork", "FRAGMENT")
_OPS: dict[str, OpDef] = {}


def op(
    operands: str,
    *,
    samples: Callable[[], Iterator[Sample]],
    also: Also | None = None,
    product: Product | None = None,
    native: Native | None = None,
    stored: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the op of its name.

    operands: axes and dtypes of operands and results, see `declared`; others are an `InputError`.
    Keyword-only arguments are options, which are never symbolic. also: checks that the declaration
    cannot express. samples: yields calls for the generic tests. product, native: see `Product` and
    `Native`. stored: operands that are weights of few bits. Results must not alias arguments.
    """

    def register(meaning: Callable[..., Any]) -> Callable[..., Any]:
        name = meaning.__name__
        declared = declare(operands, meaning, also)
        if native is not None:
            _check_native(name, native, declared)
        checked = functools.wraps(meaning)(declared.checked)

        def fake(*arguments: Any, **options: Any) -> Any:
            given = declared.check(*arguments, **options)
            return declared.like(given, *declared.bound(*arguments, **options))

        _LIBRARY.define(declared.schema)
        _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graftwork::{name}", fake, lib=_LIBRARY)
        overload = getattr(torch.ops.graftwork, name).default
        _OPS[name] = OpDef(
            name, operands, declared, checked, samples, overload, product, native, stored
        )
        return checked

    return register


def _check_native(op: str, native: Native, declared: Declared) -> None:
    """Kernels get bare addresses and numbers, and check none of them. Errors: `InputError` for
    sizes that are not one letter each of the declaration, and for a cast of what is no operand."""
    axes = [axes for _, _, axes in declared.operands]
    axes += [parts(result)[2] for result in declared.results]
    axes += [item[0] for item in declared.items if " = " in item]
    known = {letter for letter in "".join(axes) if letter.isupper()}
    wrong = [letter for letter in native.sizes if letter not in known]
    wrong += [letter for letter in native.sizes if native.sizes.count(letter) > 1]
    if wrong:
        raise InputError(
            f"{op}: its native kernel is told the sizes {native.sizes!r}, got {wrong[0]!r}: "
            f"expected each letter once, of {''.join(sorted(known))}"
        )
    if strange := [name for name in native.cast.split() if name not in declared.names]:
        raise InputError(
            f"{op}: its native kernel casts {strange[0]!r}; expected operands, of "
            f"{', '.join(declared.names)}"
        )


def all_ops() -> dict[str, OpDef]:
    """Every op by name; imports all families."""
    import_all(__name__)
    return dict(_OPS)


def op_of(target: Any) -> OpDef | None:
    """The definition of a node's target; None for core ATen ops."""
    if getattr(target, "namespace", None) != "graftwork":
        return None
    return all_ops().get(target._schema.name.partition("::")[2])


def is_exact_by_row(node: torch.fx.Node) -> bool:
    """Whether a call is an exact product, see `Product.exact`."""
    op = op_of(node.target)
    return op is not None and op.product is not None and op.product.exact(node.kwargs)


all_ops()
