"""Which products and look-ups have which weights, for passes that store weights in few bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.fx

from ...ir import Function, Program, Weight, WeightStore, arguments
from ..engine.functions import token_look_ups
from ..engine.reopening import Wants, names_of
from ..fusing.products import product_of, source_product
from .stored import Form

if TYPE_CHECKING:  # of the pass, whose options are read
    from .quantize_weights import QuantizeWeights

A = torch.ops.aten


def vocabulary(program: Program) -> frozenset[str]:
    """Names of the tables that tokens are looked up in, and of the head's weight."""
    functions = program.functions.values()
    tables = {weight_name(node) for fn in functions for node in token_look_ups(fn)}
    head = source_product(program.step.outputs.get("logits"))
    return frozenset(tables | {weight_name(head)} if product_of(head) else tables)


def weight_name(node: torch.fx.Node) -> str:
    """The name of the weight that a product multiplies with, or a look-up looks up; or ""."""
    source = node.args[0 if node.target is A.embedding.default else 1]
    known = isinstance(source, torch.fx.Node) and source.op == "get_attr"
    return str(source.target) if known else ""  # type: ignore[union-attr]


def float_weight(node: torch.fx.Node, weights: WeightStore) -> Weight | None:
    """The same as a weight, if that is a float one [N,K]."""
    name = weight_name(node)
    type = weights[name].type if name else None
    plain = type is not None and type.dtype.is_floating_point and len(type.dims) == 2
    return weights[name] if plain else None


def source_weights(pass_: QuantizeWeights, program: Program, *, anew: bool = False) -> Wants:
    """Which weights that the source holds in few bits the pass takes. anew: all of them as floats;
    if not, those that are stored as the pass would store them, or closer to their floats, stay."""
    tables = vocabulary(program)

    def wants(fn: Function, call: torch.fx.Node, floats: tuple[Weight, ...]) -> str:
        known = not tables.isdisjoint(names_of(call))
        if (known and pass_.embedding is False) or not all(map(pass_.names, floats)):
            return ""
        return "stays" if not anew and _as_stored(pass_, call, floats, known) else "floats"

    return wants


def _as_stored(
    pass_: QuantizeWeights, call: torch.fx.Node, floats: tuple[Weight, ...], known: bool
) -> bool:
    """Whether a call's weights have the bits that the pass would give them, in groups as fine."""
    given = arguments(call)
    if given.get("codebook") is not None:
        return False
    groups = [given[name] for name in ("group", "down_group") if name in given]
    for weight, group in zip(floats, groups, strict=True):
        numeric = pass_.numeric_of(weight, known)
        plain = known or len(weight.type.dims) > 2 or pass_.form_of(weight) == Form((numeric,))
        if not plain or numeric.bits != given["bits"] or numeric.group % group:
            return False
    return True
