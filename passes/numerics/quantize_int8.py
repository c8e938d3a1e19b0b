"""Store linear weights as int8 and multiply in int8.

Before::

    %y: f32[B,T,N] = aten.linear(%x, @mlp.up.weight)

After::

    %y: f32[B,T,N] = graftwork.linear_int8(%x, @mlp.up.weight.int8, @mlp.up.weight.scale)

Weights are symmetric with one scale an output channel, activations symmetric with one scale a row
(see `ir.ops.quant`), so a token's result is the same whatever shares its step, and speculation on a
quantized model stays lossless with respect to that model. In functions that only draft, layers are
coarse (``coarse=True``), which is faster: what they make is checked. A weight with other uses too
(tied embeddings) keeps its float copy there. Refuses a program without float linear layers, and a
pattern in `exclude` that names no weight.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Program,
    Role,
    TensorType,
    Weight,
    WeightStore,
    derive,
    site_of,
    type_of,
)
from ...ir.ops.quant import COARSE, quantize_rows
from ..engine.base import STATES, Contract, Effect, Outcome, Pass, register
from ..engine.facts import Predicate
from ..engine.functions import edit_with_weights
from ..fusing.dce import sweep

A, G = torch.ops.aten, torch.ops.graftwork


def _target_is_not_coarse(program: Program) -> str:
    for fn in program.functions.values():
        coarse = [n for n in fn.calls(G.linear_int8.default) if n.kwargs.get("coarse")]
        if coarse and fn.role is not Role.DRAFT:
            return f"%{coarse[0].name} of {fn.name} is coarse, and its results are not verified"
    return ""


@register
class QuantizeInt8(Pass):
    """exclude: weight names (shell patterns such as ``*lm_head*``) that stay as they are."""

    exclude: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_int8"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"int8"})
    ensures: ClassVar[tuple[Predicate, ...]] = (_target_is_not_coarse,)
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})
    exclusive: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}

    def run(self, program: Program) -> Outcome:
        """Quantize every linear weight that is not excluded, in every function."""
        self._check_patterns(program)
        return edit_with_weights(program, self._quantize)

    def _quantize(self, fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
        calls = fn.calls(A.linear.default)
        given = [(node, _weight_of(node, weights)) for node in calls]
        found = [(n, weight) for n, weight in given if weight and not self._excluded(weight)]
        if not found:
            return f"{len(calls)} linear layers, all excluded or without a weight", weights
        # What only drafts may be rounded as it runs fastest.
        coarse = fn.role is Role.DRAFT
        for node, weight in found:
            values, scale = _quantized(weight, coarse)
            weights = weights.adding(weights.taken(values), weights.taken(scale))
            _replace(fn, node, weights[values.name], weights[scale.name], coarse)
        sweep(fn)
        return len(found), weights

    def _excluded(self, weight: Weight) -> bool:
        return any(fnmatchcase(weight.name, pattern) for pattern in self.exclude)

    def _check_patterns(self, program: Program) -> None:
        for pattern in self.exclude:
            if not any(fnmatchcase(name, pattern) for name in program.weights):
                raise PassError(
                    f"quantize_int8: exclude pattern {pattern!r} names no weight of "
                    f"{program.name}; its weights look like {next(iter(program.weights), '')!r}"
                )


def _weight_of(node: torch.fx.Node, weights: WeightStore) -> Weight | None:
    source = node.args[1]
    if not isinstance(source, torch.fx.Node) or source.op != "get_attr":
        return None
    weight = weights[str(source.target)]
    return weight if weight.type.dtype.is_floating_point else None


def _quantized(weight: Weight, coarse: bool) -> tuple[Weight, Weight]:
    """The int8 values [N,K] and the float32 scales [N] of a weight, computed when loaded."""
    rows = TensorType(torch.float32, weight.type.dims[:1])
    most, name = (COARSE, f"{weight.name}.int7") if coarse else (127, f"{weight.name}.int8")
    whole = weight.type.with_dtype(torch.int8)
    values = derive(name, whole, lambda tensor: quantize_rows(tensor, most)[0], weight)
    suffix = "int7.scale" if coarse else "scale"
    scale = derive(
        f"{weight.name}.{suffix}",
        rows,
        lambda tensor: quantize_rows(tensor, most)[1].squeeze(-1),
        weight,
    )
    return values, scale


def _replace(
    fn: Function, node: torch.fx.Node, values: Weight, scale: Weight, coarse: bool
) -> None:
    x, _, *bias = node.args
    options: dict[str, Any] = {"coarse": True} if coarse else {}
    with fn.graph.inserting_before(node):
        parts = [x, fn.weight(values), fn.weight(scale), *bias]
        new = fn.call(G.linear_int8.default, *parts, site=site_of(node), **options)
    assert type_of(new) == type_of(node)
    node.replace_all_uses_with(new)
    fn.graph.erase_node(node)
