"""Weights that a source holds in a few bits, kept as they are: no float copy of them is made.

A model is traced as its float architecture, with float weights that would be worked out if somebody
loaded them. Then, before::

    %y: f32[B,T,96] = aten.linear(%x, @up.weight)

becomes::

    %y: f32[B,T,96] = graftwork.quantized_linear(%x, @up.weight.q4, @up.weight.q4.scale,
      @up.weight.q4.offset, bits=4, group=32, rounded=False)

and nobody asks for the float weight any more. Experts of mixtures become a stack of stored weights
(`graftwork.quantized_moe`). What something else than a product or a look-up reads (a weight with a
norm folded in) stays float, with a warning that names it. Values are the source's, bit for bit, and
products are float unless the source rounds its activations.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from ..ir import (
    Function,
    GraftworkWarning,
    Program,
    Weight,
    WeightStore,
    arguments,
    site_of,
    type_of,
)
from ..ir.ops.numerics import PARTS, Numeric
from ..ir.ops.quantized import rounding
from ..ir.rewrite.mixtures import Stack, store_experts
from ..ir.rewrite.stored import float_weight

A, G = torch.ops.aten, torch.ops.graftwork
_SHOWN = 3


@dataclass(frozen=True)
class StoredWeight:
    """A weight [N,K] of a few bits, as `graftwork.quantized_linear` takes it; or a stack of experts
    [E,N,K], whose parts have an axis of experts before the others.

    weight: u8[N,K*bits/8]. scale, offset: f32|f16[N,K/group]. codebook: f32[2^bits]. order: i64[K],
    the input channel that each stored column belongs to; None: they are in order. rounded: the
    source rounds activations to int8, span values of a row by one scale, or all (0).
    """

    numeric: Numeric
    weight: Weight
    scale: Weight
    offset: Weight | None = None
    codebook: Weight | None = None
    order: Weight | None = None
    rounded: bool = False
    span: int = 0

    @property
    def dims(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        rows, groups = (int(str(dim)) for dim in self.scale.type.dims)
        return rows, groups * self.numeric.group

    def values(self, name: str) -> Weight:
        """The same as a float weight f32[N,K], its columns in order, worked out when loaded."""
        given = {part: w for part in (*PARTS, "order") if (w := getattr(self, part)) is not None}
        return float_weight(name, given, self.numeric.bits)


def keep_stored(program: Program, stored: Mapping[str, StoredWeight]) -> Program:
    """The program with every product with a stored weight, and every look-up in one, done on its
    bits. stored: by the names of the program's float weights.

    Warns (`GraftworkWarning`) of those that something else reads, which stay float.
    """
    names = stored.keys() & program.weights.keys()
    if not names:
        return program
    functions, parts = {}, _Parts(program.weights)
    for name, function in program.functions.items():
        fn = function.copy()
        for node in fn.calls(A.linear.default, A.embedding.default):
            if (key := _weight_name(node)) in names:
                _replace(fn, node, parts.of(key, stored[key]))
        for node in fn.calls(G.moe.default):
            keys = [_named(arguments(node)[name]) for name in ("gate_up", "down")]
            if names.issuperset(keys) and _alike(*(stored[key] for key in keys)):
                _replace_experts(fn, node, *(parts.of(key, stored[key]) for key in keys))
        fn.graph.eliminate_dead_code()
        functions[name] = fn
    kept = program.replace(functions=functions, weights=parts.weights).pruned()
    warn_of_dequantized(sorted(names & kept.weights.keys()), "no plain product reads them")
    return kept


def warn_of_dequantized(names: Sequence[str], why: str) -> None:
    """Warn (`GraftworkWarning`) of weights that the source holds in few bits and the program as
    floats; of none, if there are none."""
    if not names:
        return
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    warnings.warn(
        f"{len(names)} weights of few bits are dequantized, because {why}: {shown}",
        GraftworkWarning,
        stacklevel=2,
    )


@dataclass
class _Parts:
    """The stored weights' parts under names of their own; equal orders and codebooks only once, so
    that products which share them can be merged."""

    weights: WeightStore
    alike: dict[bytes, Weight] = field(default_factory=dict)

    def of(self, name: str, stored: StoredWeight) -> StoredWeight:
        prefix = f"{name}.q{stored.numeric.bits}"
        offset = self._own(stored.offset, f"{prefix}.offset")
        weight, scale = (
            self._own(stored.weight, prefix),
            self._own(stored.scale, f"{prefix}.scale"),
        )
        assert weight is not None and scale is not None
        order = self._shared(stored.order, f"{prefix}.order")
        codebook = self._shared(stored.codebook, f"{prefix}.codebook")
        return replace(
            stored, weight=weight, scale=scale, offset=offset, order=order, codebook=codebook
        )

    def _own(self, weight: Weight | None, name: str) -> Weight | None:
        if weight is None:
            return None
        named = self.weights.taken(weight.renamed(name))  # a tied weight is there already
        self.weights = self.weights.adding(named)
        return named

    def _shared(self, weight: Weight | None, name: str) -> Weight | None:
        if weight is None:
            return None
        digest = hashlib.sha256(weight.load().numpy().tobytes()).digest()
        if digest not in self.alike:
            named = self._own(weight, name)
            assert named is not None
            self.alike[digest] = named
        return self.alike[digest]


def _weight_name(node: torch.fx.Node) -> str:
    return _named(arguments(node)["weight"])


def _named(source: torch.fx.Node) -> str:
    return str(source.target) if source.op == "get_attr" else ""


def _alike(first: StoredWeight, second: StoredWeight) -> bool:
    """Whether stacks can be those of one mixture."""
    both = ((one.numeric.bits, one.rounded, one.span) for one in (first, second))
    return len(set(both)) == 1


def _replace_experts(
    fn: Function, node: torch.fx.Node, gate_up: StoredWeight, down: StoredWeight
) -> None:
    stacks = [Stack(s.weight, s.scale, s.offset, s.numeric.group) for s in (gate_up, down)]
    how = rounding(gate_up.rounded, gate_up.span)
    store_experts(fn, node, *stacks, bits=gate_up.numeric.bits, how=how)


def _replace(fn: Function, node: torch.fx.Node, stored: StoredWeight) -> None:
    given = arguments(node)
    looked_up = node.target is A.embedding.default
    options: dict[str, Any] = {"bits": stored.numeric.bits, "group": stored.numeric.group}
    site = site_of(node)
    with fn.graph.inserting_before(node):
        parts = [
            None if part is None else fn.weight(part)
            for part in (getattr(stored, name) for name in PARTS)
        ]
        if looked_up:
            new = fn.call(
                G.quantized_embedding.default, given["indices"], *parts, site=site, **options
            )
            if type_of(new) != type_of(node):  # tables give float32
                new = fn.call(A._to_copy.default, new, dtype=type_of(node).dtype, site=site)
        else:
            x = given["input"]
            if stored.order is not None:
                order = fn.weight(stored.order)
                x = fn.call(A.index_select.default, x, -1, order, site=site)
            options |= rounding(stored.rounded, stored.span)
            new = fn.call(
                G.quantized_linear.default, x, *parts, given["bias"], site=site, **options
            )
    node.replace_all_uses_with(new)
    fn.graph.erase_node(node)
