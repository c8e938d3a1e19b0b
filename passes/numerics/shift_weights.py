"""Read weights that are stored in many bits as fewer, by a shift: one store serves several.

Before::

    %y: f32[B,T,96] = graftwork.quantized_linear(%h, @up.q8, @up.q8.scale, @up.q8.offset, bits=8,
      group=32)

After, with 4 bits::

    %y: f32[B,T,96] = graftwork.quantized_linear(%h, @up.q8.as4, @up.q8.scale.as4, @up.q8.offset,
      bits=4, group=32)

A stored value q becomes min((q + 2^(d-1)) >> d, 2^bits - 1) for d bits less, its scale 2^d times as
much, and offsets stay: nothing is quantized anew, and nothing but the store is needed. Weights of
no more bits stay as they are; the experts of mixtures are shifted alike. `graftwork.load` does this
to an artifact (``bits=``).

Refuses a program without stored weights of more bits, with a codebook, or where rows would not fill
whole bytes. Source: Huang et al., "Nearly Lossless Adaptive Bit Switching" (2025).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    TensorType,
    Weight,
    WeightStore,
    arguments,
    derivation,
    derive,
    site_of,
)
from ...ir.ops.numerics import Numeric, pack, unpack
from ...ir.program import Program
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.stored import group_of, operand, stored_in, stored_ops
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Contract, Effect, Outcome, Pass, register
from ..engine.functions import edit_with_weights

G = torch.ops.graftwork


@register
class ShiftWeights(Pass):
    """bits: to read a weight as, where it has more."""

    bits: Literal[2, 3, 4, 6] = 4

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"quantized"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})

    def run(self, program: Program) -> Outcome:
        """Shift every stored weight of more bits, wherever it is multiplied or looked up."""
        return edit_with_weights(program, self._shift)

    def _shift(self, fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
        calls = fn.calls(*stored_ops())
        found = [node for node in calls if int(arguments(node)["bits"]) > self.bits]
        if not found:
            known = sorted({int(arguments(node)["bits"]) for node in calls})
            return f"weights of {', '.join(map(str, known)) or 'no'} bits are stored", weights
        for node in found:
            weights = self._replace(fn, node, weights)
        sweep(fn)
        return len(found), weights

    def _replace(self, fn: Function, node: torch.fx.Node, weights: WeightStore) -> WeightStore:
        given, target = arguments(node), cast(Any, node.target)
        with fn.graph.inserting_before(node):
            nodes: dict[str, torch.fx.Node] = {}
            for name in stored_in(node):
                names = name, operand(name, "scale")
                packed, scale = (weights[str(given[part].target)] for part in names)
                self._check(packed, given, group_of(node, name))
                made = _shifted(packed, scale, int(given["bits"]), self.bits, weights)
                weights = weights.adding(*made)
                nodes |= {part: fn.weight(new) for part, new in zip(names, made, strict=True)}
            places = [a.name for a in target._schema.arguments if not a.kwarg_only]
            parts = [nodes.get(name, value) for name, value in zip(places, node.args, strict=False)]
            options: dict[str, Any] = {**node.kwargs, "bits": self.bits}
            new_node = fn.call(target, *parts, site=site_of(node), **options)
        fn.replace(node, new_node)
        return weights

    def _check(self, packed: Weight, given: dict[str, Any], group: int) -> None:
        """Errors: `PassError` for a weight that cannot be shifted."""
        if given.get("codebook") is not None:
            raise PassError(
                f"shift_weights: {packed.name} is stored by a codebook, whose entries have no "
                f"order to shift in"
            )
        columns = int(str(packed.type.dims[-1])) * 8 // int(given["bits"])
        if why := Numeric(self.bits, group).refusal(columns):
            raise PassError(f"shift_weights: {packed.name}: {why}")


def _shifted(
    packed: Weight, scale: Weight, before: int, bits: int, weights: WeightStore
) -> tuple[Weight, Weight]:
    """A weight's bits and scales as fewer bits, computed when loaded."""
    *outer, width = packed.type.shape
    type = TensorType(torch.uint8, (*outer, width * bits // before))
    names = (fresh_name(weights, f"{weight.name}.as{bits}") for weight in (packed, scale))
    made = (
        derive(next(names), type, shifted, packed, before=before, bits=bits),
        derive(next(names), scale.type, scaled, scale, before=before, bits=bits),
    )
    return weights.alike(made[0]), weights.alike(made[1])


@derivation
def shifted(packed: torch.Tensor, *, before: int, bits: int) -> torch.Tensor:
    """Values of `before` bits as the nearest of `bits`, the lowest bits cut off."""
    down = before - bits
    steps = (unpack(packed, before) + 2 ** (down - 1)) // 2**down
    return pack(steps.clamp(max=2**bits - 1), bits)


@derivation
def scaled(scale: torch.Tensor, *, before: int, bits: int) -> torch.Tensor:
    """The steps of such values."""
    return Numeric(bits, 1, scale=scale.dtype).stored(scale.float() * 2 ** (before - bits))
