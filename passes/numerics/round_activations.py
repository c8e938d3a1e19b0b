"""Round the activations of products with weights of few bits to int8.

Before, as a quantized checkpoint is read::

    %y: f32[B,T,96] = graftwork.quantized_linear(%x, @up.q4, @up.q4.scale, bits=4, group=32,
      rounded=False)

After::

    %y: f32[B,T,96] = graftwork.quantized_linear(%x, @up.q4, @up.q4.scale, bits=4, group=32)

Weights stay as they are. Formats mean float products, so a checkpoint's are float until somebody
asks for this; with rounded activations native kernels run on the bits themselves.

Refuses a program without such products, and codebooks of other than whole numbers (nf4's), whose
products are float.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, PassError, Program, arguments
from ...ir.ops.quantized import rounding
from ...ir.rewrite.stored import product_sizes
from ..engine.base import STATES, Contract, Effect, Outcome, Pass, register
from ..engine.functions import edit_each
from .rounding import SPAN

G = torch.ops.graftwork
LARGEST = 127
PRODUCTS = (G.quantized_linear.default, G.quantized_moe.default)


@register
class RoundActivations(Pass):
    """span: so many activations share a scale; 0: all of a row."""

    span: Annotated[int, Field(ge=0)] = SPAN

    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical", "quantized"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}

    def run(self, program: Program) -> Outcome:
        """Round them in every function."""

        def edit(fn: Function) -> int | str:
            for node in float_products(fn):
                if not may_round(program, node):
                    raise PassError(
                        f"round_activations: {arguments(node)['weight'].target} has a codebook of "
                        f"other than whole numbers up to {LARGEST}, so its products are float; "
                        f"leave the pass out, or quantize the original (recipe int4)"
                    )
            count = round_products(program, fn, self.span)
            return (
                count
                or f"{len(fn.calls(*PRODUCTS))} products have weights of few bits, all rounded"
            )

        return edit_each(program, edit)


def round_products(program: Program, fn: Function, span: int = SPAN) -> int:
    """Round the activations of a function's products with weights of few bits, in place, where that
    is possible; of how many. span: see `RoundActivations`."""
    found = [node for node in float_products(fn) if may_round(program, node)]
    for node in found:
        rest = {k: v for k, v in node.kwargs.items() if k != "rounded"}
        node.kwargs = {**rest, **rounding(True, span, *product_sizes(node))}
    return len(found)


def float_products(fn: Function) -> list[torch.fx.Node]:
    """Products with weights of few bits whose activations are floats."""
    return [node for node in fn.calls(*PRODUCTS) if not arguments(node)["rounded"]]


def may_round(program: Program, node: torch.fx.Node) -> bool:
    """Whether a product's codebook, if any, has values that sums of whole numbers can have."""
    codebook = arguments(node).get("codebook")  # mixtures have none
    if codebook is None:
        return True
    values = program.weights[str(codebook.target)].load()
    return bool((values == values.round()).all() and values.abs().max() <= LARGEST)
