"""The graftwork op set. One op is one decorated function: schema, docstring, meaning, samples.

`define` registers the function as ``torch.ops.graftwork.<name>``; its body is both the reference
semantics and the decomposition that backends inline. Everything else (printing, parsing, type
inference, verification, documentation, the generic op tests) derives from that one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..discovery import import_all

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of one call, with small concrete tensors."""


@dataclass(frozen=True)
class OpDef:
    """What is known of one op: where its overload, meaning, samples and documentation are."""

    name: str
    schema: str
    meaning: Callable[..., Any]
    samples: Callable[[], Iterator[Sample]]
    overload: Any

    @property
    def doc(self) -> str:
        """The op's documentation: its meaning's docstring."""
        return (self.meaning.__doc__ or "").strip()


_LIBRARY = torch.library.Library("graftwork", "FRAGMENT")
_OPS: dict[str, OpDef] = {}


def define(
    schema: str,
    *,
    samples: Callable[[], Iterator[Sample]],
    fake: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the op that `schema` declares.

    schema: torch's schema language without the namespace, ``"glu(Tensor a, Tensor b) -> Tensor"``.
    samples: a generator of calls for the generic tests. fake: a shape rule, where running the
    meaning on fake tensors is too slow or would constrain symbolic sizes. Results must not alias
    arguments.
    """

    def register(meaning: Callable[..., Any]) -> Callable[..., Any]:
        name = schema.partition("(")[0].strip()
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, meaning, "CompositeExplicitAutograd")
        torch.library.register_fake(f"graftwork::{name}", fake or meaning, lib=_LIBRARY)
        overload = getattr(torch.ops.graftwork, name).default
        _OPS[name] = OpDef(name, schema, meaning, samples, overload)
        return meaning

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


all_ops()
