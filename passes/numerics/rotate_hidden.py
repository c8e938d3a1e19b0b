"""Turn the residual stream by an orthogonal matrix, so that no channel of it stands out.

Before::

    %x: f32[B,T,64] = aten.embedding(@embed, %tokens)
    %n: f32[B,T,64] = graftwork.rms_norm(%x, @gain, eps=1e-06)
    %u: f32[B,T,96] = aten.linear(%n, @up)
    %d: f32[B,T,64] = aten.linear(%u, @down)
    %y: f32[B,T,64] = aten.add.Tensor(%x, %d)

After, where ``Q`` is the matrix::

    %x: f32[B,T,64] = aten.embedding(@embed.turned, %tokens)            # embed Q
    %n: f32[B,T,64] = graftwork.rms_norm(%x, @gain.ones, eps=1e-06)
    %u: f32[B,T,96] = aten.linear(%n, @up.read)                         # up diag(gain) Q
    %d: f32[B,T,64] = aten.linear(%u, @down.turned)                     # Q^T down
    %y: f32[B,T,64] = aten.add.Tensor(%x, %d)

A norm without gain turns with what it reads, so the program computes the same, and what is rounded
to few bits later, activations and weights, has no outliers. Q is a Hadamard matrix with random
signs, of the largest power of two that divides the width, times a random orthogonal one for the
rest. A table that look-up and head share becomes two.

Refuses models whose stream is read, or written, by anything but such norms and products.
Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs" (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, ClassVar

import torch
import torch.fx
from pydantic import Field
from torch import Tensor

from ...ir import Function, PassError, Program, Weight, WeightStore, derivation, derive, type_of
from ...ir.ops.quantized_cache import hadamard
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_with_weights, token_look_ups
from ..engine.reopening import Reopened, reopened

A, G = torch.ops.aten, torch.ops.graftwork
SCALED = (
    *(G.hidden.default, A._to_copy.default, A.neg.default),
    *(A.mul.Tensor, A.mul.Scalar, A.div.Tensor),
)
"""Calls whose result turns with the one value that they take."""


@register
class RotateHidden(Pass):
    """seed: of the matrix."""

    seed: Annotated[int, Field(ge=0)] = 0

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.HIDDEN_BASIS})

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """The source's weights of few bits as floats: whole numbers do not turn."""
        return reopened(program, held, lambda fn, call, floats: "floats", what="turned as floats")

    def run(self, program: Program) -> Outcome:

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            stream = _Stream(fn)
            return stream.turn(weights, self.seed)

        return edit_with_weights(program, edit, TARGET)


class _Stream:
    """What a function adds up from layer to layer, and who writes and reads it.

    Errors: `PassError` for who does neither by a product nor by a norm in front of products.
    """

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.tables = token_look_ups(fn)
        self.values = set(self.tables)
        self.writers: list[torch.fx.Node] = []
        self.norms: list[torch.fx.Node] = []
        for node in fn.calls():
            read = [arg for arg in node.all_input_nodes if arg in self.values]
            if read and node not in self.values:
                self._follow(node, read)
        self.readers = [(norm, user) for norm in self.norms for user in norm.users]
        for norm, user in self.readers:
            if user.target is not A.linear.default or user.args[0] is not norm:
                raise _refusal(f"%{user.name} ({user.target}) reads what %{norm.name} gives")

    def _follow(self, node: torch.fx.Node, read: list[torch.fx.Node]) -> None:
        if node.target is G.rms_norm.default:
            self.norms.append(node)
            return
        others = [x for x in node.all_input_nodes if x not in self.values and not _is_number(x)]
        if node.target is A.add.Tensor and len(read) + len(others) == 2:
            self.writers.extend(map(self._product, others))
        elif node.target is not G.pick_rows.default and (others or node.target not in SCALED):
            raise _refusal(f"%{node.name} ({node.target}) reads the residual stream")
        self.values.add(node)

    def _product(self, node: torch.fx.Node) -> torch.fx.Node:
        """The product that makes what is added, scaled or not."""
        while node.target in SCALED and len(node.users) == 1:
            found = [x for x in node.all_input_nodes if not _is_number(x)]
            if len(found) != 1:
                break
            node = found[0]
        if node.target is not A.linear.default or len(node.users) != 1:
            raise _refusal(f"%{node.name} ({node.target}) is added to the residual stream")
        return node

    def turn(self, weights: WeightStore, seed: int) -> tuple[int | str, WeightStore]:
        """Exchange the weights of all writers and readers; how many products there are."""
        if not self.readers:
            return "no norm reads what tokens are looked up as", weights
        turner = _Turner(self.fn, weights, seed)
        for table in self.tables:
            turner.give(table, 0, "turned", rows_turned)
        for writer in dict.fromkeys(self.writers):
            turner.give(writer, 1, "turned", outputs_turned)
            turner.give(writer, 2, "turned", rows_turned)
        for norm, user in self.readers:
            turner.give(user, 1, "read", rows_turned, norm.args[1])
        for norm in self.norms:
            turner.give(norm, 1, "ones", ones)
        sweep(self.fn)
        return len(self.writers) + len(self.readers), turner.weights


class _Turner:
    """Puts weights that are made of a function's weights in their place."""

    def __init__(self, fn: Function, weights: WeightStore, seed: int) -> None:
        self.fn, self.weights, self.seed = fn, weights, seed

    def give(
        self, node: torch.fx.Node, place: int, kind: str, made: Callable[..., Tensor], *more: Any
    ) -> None:
        """Let a call take, at a place of its arguments, what is made of the weight there."""
        old = node.args[place] if place < len(node.args) else None
        if old is None:
            return
        given = [self._weight(arg, node) for arg in (old, *more)]
        name = fresh_name(self.weights, f"{given[0].name}.{kind}")
        new = self.weights.alike(derive(name, given[0].type, made, *given, seed=self.seed))
        self.weights = self.weights.adding(new)
        with self.fn.graph.inserting_before(node):
            node.update_arg(place, self.fn.weight(new))

    def _weight(self, arg: Any, node: torch.fx.Node) -> Weight:
        if not isinstance(arg, torch.fx.Node) or arg.op != "get_attr":
            raise _refusal(f"%{node.name} ({node.target}) multiplies with what it computes")
        return self.weights[str(arg.target)]


@derivation
def rows_turned(rows: Tensor, gain: Tensor | None = None, *, seed: int) -> Tensor:
    """Rows [...,H], times gains [H], times the matrix, in float32 and back in their dtype."""
    scaled = rows if gain is None else rows * gain
    return turned(scaled.float(), seed).to(scaled.dtype).to(rows.dtype).contiguous()


@derivation
def outputs_turned(weight: Tensor, *, seed: int) -> Tensor:
    """A weight [H,K] whose outputs are turned."""
    return rows_turned(weight.T, seed=seed).T.contiguous()


@derivation
def ones(gain: Tensor, *, seed: int) -> Tensor:
    """Gains of 1 in a gain's place."""
    return torch.ones_like(gain)


def turned(rows: Tensor, seed: int) -> Tensor:
    """Rows f32[...,H] times the orthogonal matrix of their width and a seed."""
    width = rows.shape[-1]
    signs, rest = _parts(width, seed)
    blocks = (rows * signs).unflatten(-1, (len(rest), width // len(rest)))
    return torch.einsum("...md,mn->...nd", hadamard(blocks), rest).flatten(-2)


@lru_cache(maxsize=4)
def _parts(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Signs f32[H], and an orthogonal matrix f32[M,M], M the odd part of H."""
    odd = width
    while odd % 2 == 0:
        odd //= 2
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (width,), generator=generator).float() * 2 - 1
    drawn = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    return signs, torch.linalg.qr(drawn).Q.float()


def _is_number(node: torch.fx.Node) -> bool:
    """Whether a value is a constant that scales all channels alike."""
    return node.op == "get_attr" and all(dim == 1 for dim in type_of(node).dims)


def _refusal(why: str) -> PassError:
    return PassError(f"rotate_hidden: {why}; it turns models of RMS norms and linear layers alone")
