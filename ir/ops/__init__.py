"""The graftwork op set. One op is one decorated function: declaration, docstring, meaning, samples.

`op` registers the function as ``torch.ops.graftwork.<name>``; its body is both the reference
semantics and the decomposition that backends inline. Everything else (schema, checks, result types,
printing, parsing, verification, documentation, the generic op tests) derives from that one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ..support.discovery import import_all
from .declared import Also, Declared, declare

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of one call, with small concrete tensors."""


Options = Mapping[str, Any]
"""Keyword arguments of a call."""


@dataclass(frozen=True)
class Product:
    """That an op is a product (x [...,K], weight, ...) of rows with the rows of a weight.

    stored: its arguments after x that have the outputs as their first axis, the weight first, so
    that several products of one x are one product of the joined arguments; what it has besides,
    they must share. inner: how many of them, from the first, must agree in all but that axis.
    exact: whether a call rounds x to integers and adds exactly: then a row's result has the same
    bits whatever rows are beside it, and float error in x may grow to a step of the rounding.
    """

    stored: tuple[str, ...]
    inner: int
    exact: Callable[[Options], bool] = lambda options: False


@dataclass(frozen=True)
class Native:
    """That a kernel of `backends/kernels` does what an op does, on floating operands in float32.

    sizes: those of the declaration's letters that the kernel is told, in its order. cast: floating
    operands, by name, that torch converts to float32 first; other dtypes of the rest run the op's
    meaning. onnx: whether ONNX Runtime runs the kernel, too. An option that may be None or a
    floating number is 0 to the kernel where it is None.
    """

    sizes: str
    cast: str = ""
    onnx: bool = True


@dataclass(frozen=True)
class OpDef:
    """What is known of one op: where its overload, meaning, samples and documentation are.

    operands: the text of its declaration. declared: what follows from it. product: see `Product`,
    None for an op that is none. native: see `Native`, None for an op without a kernel. stored: the
    operands that are weights of few bits, see `ir.rewrite.stored`.
    """

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
        """The op's documentation: its meaning's docstring."""
        return (self.meaning.__doc__ or "").strip()

    @property
    def row(self) -> str:
        """The op's row in docs/ops.md: name, declaration and the first sentence of its doc."""
        said = self.operands.replace(", also", "").replace("also ", "").replace("|", "\\|")
        return (
            f"| `{self.name}` | `{said}` | {' '.join(self.doc.partition(chr(10) * 2)[0].split())} |"
        )


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
    """Register the decorated function as the op of its name, which it then checks operands for.

    operands: their axes and dtypes, and the results', see `declared`. Arguments that are passed by
    keyword alone are options, whose numbers are never symbolic. also: what the text cannot say.
    samples: a generator of calls for the generic tests. product: what passes and backends ask of
    products, see `Product`. native: see `Native`. stored: operands that are weights of few bits.
    Results must not alias arguments.
    """

    def register(meaning: Callable[..., Any]) -> Callable[..., Any]:
        name = meaning.__name__
        declared = declare(operands, meaning, also)
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


def all_ops() -> dict[str, OpDef]:
    """Every defined op by name, families loaded."""
    import_all(__name__)
    return dict(_OPS)


def op_of(target: Any) -> OpDef | None:
    """The definition behind a node's target, or None for core ATen ops."""
    if getattr(target, "namespace", None) != "graftwork":
        return None
    return all_ops().get(target._schema.name.partition("::")[2])


def is_exact_by_row(node: torch.fx.Node) -> bool:
    """Whether a call is a product that rounds its rows and adds exactly, see `Product.exact`."""
    op = op_of(node.target)
    return op is not None and op.product is not None and op.product.exact(node.kwargs)


all_ops()
