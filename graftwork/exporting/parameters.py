"""The parameters of a model of transformers in a program, whatever passes have made of them.

Exports that write a model's own tensors find them here: the rows of a module in a product that was
merged, the parts of weights of few bits, and other weights by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from ..ir import (
    Program,
    TensorType,
    UnsupportedError,
    Weight,
    arguments,
    cone,
    derive,
    site_of,
    type_of,
)
from ..ir.ops.quantized import LOOK_UPS
from ..ir.rewrite.stored import parts_of
from ..ir.weights import piece
from ..passes.numerics.solver import scaled_name

A, G = torch.ops.aten, torch.ops.graftwork
PRODUCTS = (A.linear.default, G.quantized_linear.default)
MIXTURES = (G.moe.default, G.quantized_moe.default)
STACKS = {"gate_up_proj": "gate_up", "down_proj": "down"}
"""Names of expert stacks: in modules, and in `graftwork.moe`."""


@dataclass(frozen=True)
class Rows:
    """A module's rows start..stop of the weight of a product or table."""

    node: torch.fx.Node
    start: int
    stop: int

    def of(self, weight: Weight, name: str) -> Weight:
        """These rows of a weight."""
        dims = (self.stop - self.start, *weight.type.dims[1:])
        if dims == weight.type.dims:
            return weight.renamed(name)
        type = TensorType(weight.type.dtype, dims)
        return derive(name, type, piece, weight, axis=0, start=self.start, end=self.stop)


@dataclass
class Parameters:
    """Finds a model's parameters in a program. twin: the model, without data.

    held: the rows of products and tables by module. mixtures: by module. known: weights by name,
    those that others are derived from, too.
    """

    program: Program
    twin: nn.Module

    def __post_init__(self) -> None:
        nodes = self.nodes()
        self.held = dict(modules(nodes))
        self.mixtures = dict(mixtures(nodes))
        self.known = dict(reachable(self.program.weights))

    def nodes(self) -> list[torch.fx.Node]:
        """The calls that the parameters are sought in: those that the logits depend on."""
        return sorted(cone([self.program.step.outputs["logits"]]))

    def named(self, name: str, type: TensorType) -> Weight:
        """A parameter that is a weight by itself. Errors: `UnsupportedError` if there is none of
        this name and size."""
        current = name
        while scaled_name(current) in self.known:  # rescaled by AWQ
            current = scaled_name(current)
        weight = self.known.get(current)
        if weight is None or weight.type.dims != type.dims:
            got = "nothing of that name" if weight is None else str(weight.type)
            raise UnsupportedError(
                f"the parameter {name} {type} cannot be found in the program ({got}): a pass has "
                f"made it part of another weight; export a recipe without that pass"
            )
        return weight

    def bias(self, rows: Rows, name: str) -> Weight:
        """A product's bias of these rows. Errors: `UnsupportedError` if it is computed."""
        bias = arguments(rows.node)["bias"]
        if bias is None or bias.op != "get_attr":
            raise UnsupportedError(f"the bias {name} cannot be found in the program")
        return rows.of(self.program.weights[str(bias.target)], name)

    def parts(self, node: torch.fx.Node, stack: str) -> list[Weight | None]:
        """Weight, scale and offset of a product of few bits, or of a stack of a mixture's."""
        weight, scale, offset, _ = parts_of(node, stack or "weight").values()
        operands = weight, scale, offset
        return [o if o is None else self.program.weights[str(o.target)] for o in operands]


def mixtures(nodes: Iterable[torch.fx.Node]) -> Iterator[tuple[str, torch.fx.Node]]:
    """Mixtures of experts by module."""
    for node in nodes:
        if node.target in MIXTURES:
            yield site_of(node).module, node


def modules(nodes: Iterable[torch.fx.Node]) -> Iterator[tuple[str, Rows]]:
    """Rows of products and tables by module."""
    for node in nodes:
        if node.target in LOOK_UPS:
            count = int(str(arguments(node)["weight"].meta["type"].dims[0]))
            yield site_of(node).module, Rows(node, 0, count)
        elif node.target in PRODUCTS:
            yield from _pieces(node)


def _pieces(node: torch.fx.Node) -> Iterator[tuple[str, Rows]]:
    """A product's rows, by module if products were merged."""
    count = int(str(type_of(node).dims[-1]))
    splits = [user for user in node.users if user.target is A.split_with_sizes.default]
    if len(splits) != 1 or len(node.users) != 1:
        yield site_of(node).module, Rows(node, 0, count)
        return
    sizes: Any = splits[0].args[1]
    for part in splits[0].users:
        index: Any = part.args[1]
        start = sum(sizes[:index])
        yield site_of(part).module, Rows(node, start, start + sizes[index])


def reachable(weights: Mapping[str, Weight]) -> Iterator[tuple[str, Weight]]:
    """Weights by name, with those that they are derived from."""
    for weight in weights.values():
        yield from reachable({part.name: part for part in weight.inputs})
    yield from weights.items()
