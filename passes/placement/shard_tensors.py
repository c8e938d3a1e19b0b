"""Spread the weights over processes that run the program together (tensor parallelism).

Before::

    %g: f32[B,T,48] = aten.linear(%x, @gate)
    %u: f32[B,T,48] = aten.linear(%x, @up)
    %m: f32[B,T,48] = graftwork.glu(%g, %u, activation="silu")
    %d: f32[B,T,32] = aten.linear(%m, @down)

After, in the process of rank 0 of two::

    %g: f32[B,T,24] = aten.linear(%x, @gate.part)
    %u: f32[B,T,24] = aten.linear(%x, @up.part)
    %m: f32[B,T,24] = graftwork.glu(%g, %u, activation="silu")
    %e: f32[B,T,32] = aten.linear(%m, @down.part)
    %d: f32[B,T,32] = graftwork.all_reduce(%e, part=0, parts=2)

Attention likewise, by heads: caches hold a process's own heads. A bias of the last product is added
once, after the sum. The head's outputs and the embedding's rows are split by vocabulary; their
results are gathered and summed, so that every process has all logits and takes the same decisions.

With exact, no sum is split: what the last product takes is gathered, and its outputs are split and
gathered, too. Rows are then rounded as in one process, as products with weights of few bits round
them, and recipes with such weights say the same; about twice as much is exchanged.

Norms and the residual stream are whole in each. One product for query, key and value, or for gate
and up, becomes several.

A block that cannot be split stays whole in every process, and the report names the first: heads
that do not divide, a norm across heads, experts. Refuses a program in which no block can, a rank
that is none, and a program that is split already.
Source: Shoeybi et al., "Megatron-LM" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
import torch.fx
from pydantic import Field

from ...ir import (
    Function,
    PassError,
    Program,
    TensorType,
    WeightStore,
    arguments,
    cone,
    derive,
    site_of,
    type_of,
)
from ...ir.ops.parallel import started
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.subgraph import fresh_name
from ...ir.weights import piece
from ..engine.base import Effect, Outcome, Pass, register
from ..engine.functions import TARGET, edit_with_weights
from .spread import NotSpread, Region, region_of

A, G = torch.ops.aten, torch.ops.graftwork
SPLIT = A.split_with_sizes.default


@register
class ShardTensors(Pass):
    """processes: their number. rank: which of them this program is for, counted from 0; None for
    the rank that this process has (torchrun says it). exact: split no sum."""

    processes: Annotated[int, Field(ge=2, le=1024)] = 2
    rank: Annotated[int, Field(ge=0)] | None = None
    exact: bool = False

    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.PLACEMENT})
    reads: ClassVar[frozenset[Effect]] = frozenset({Effect.HIDDEN_BASIS, Effect.LAYER_SET})
    brings: ClassVar[str] = "several processes (torchrun)"

    def run(self, program: Program) -> Outcome:
        if program.plan.source.encoder is not None:
            raise PassError(
                f"pass {self.name!r}: {program.name} writes from a source, and the states that are "
                "made of it are not split yet: run it in one process"
            )
        if any(fn.calls(G.all_reduce.default) for fn in program.functions.values()):
            raise PassError(f"pass {self.name!r}: the program is a part of another one already")
        part, left = self._part(), list[str]()

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            splitter = _Splitter(fn, weights, part, self.processes, self.exact)
            splitter.separate_products()
            blocks, stays = splitter.blocks()
            if not blocks:
                return (stays or ["no product of what products gave"])[0], weights
            found = blocks + splitter.head() + splitter.embeddings()
            fn.retype()
            sweep(fn)
            left.extend(stays)
            return found, splitter.weights

        outcome = edit_with_weights(program, edit, TARGET)
        if not left:
            return outcome
        remark = f"{len(left)} blocks stay whole in each of {self.processes} processes: {left[0]}"
        return Outcome(outcome.program, outcome.matches, outcome.near_miss, (remark,))

    def _part(self) -> int:
        found = started()
        rank = self.rank if self.rank is not None or found is None else found[0]
        if rank is None:
            raise PassError(
                f"pass {self.name!r} splits a model among {self.processes} processes, and this is "
                f"one alone: run torchrun --nproc-per-node {self.processes} SCRIPT, or set the "
                f"option rank to make the part of one of them"
            )
        if rank >= self.processes or (self.rank is None and found and found[1] != self.processes):
            here = "" if found is None else f"; this is process {found[0]} of {found[1]}"
            raise PassError(
                f"pass {self.name!r}: expected a rank of 0 to {self.processes - 1} among "
                f"processes={self.processes}, got {rank}{here}: set processes to their number"
            )
        return rank


@dataclass
class _Splitter:
    """One function (a copy) on its way to being a part."""

    fn: Function
    weights: WeightStore
    part: int
    parts: int
    exact: bool

    @property
    def whose(self) -> dict[str, Any]:
        """Options of what processes do together."""
        return {"part": self.part, "parts": self.parts}

    def separate_products(self) -> None:
        """One product each for the pieces that a product's outputs are cut into."""
        for node in self.fn.calls(A.linear.default):
            pieces = _pieces(node)
            if pieces is None:
                continue
            for old, start, end in pieces:
                with self.fn.graph.inserting_before(node):
                    given = [
                        self._derived(arg, 0, start, end, f"{start}")
                        for arg in node.all_input_nodes[1:]
                    ]
                    new = self.fn.call(A.linear.default, node.args[0], *given, site=site_of(node))
                old.replace_all_uses_with(new)
        sweep(self.fn)

    def blocks(self) -> tuple[int, list[str]]:
        """Split what can be; how many blocks, and why the others cannot."""
        count, stays = 0, []
        for leave in self.fn.calls(A.linear.default):
            region = region_of(leave, self.parts)
            if region is None:
                continue
            try:
                region.spread()
                self._check_outputs(leave)
            except NotSpread as reason:
                stays.append(str(reason))
                continue
            self._split(region)
            count += 1
        return count, stays

    def _check_outputs(self, leave: torch.fx.Node) -> None:
        outputs = type_of(leave).dims[-1]
        if self.exact and (not isinstance(outputs, int) or outputs % self.parts):
            raise NotSpread(
                f"the {outputs} outputs of %{leave.name} do not divide by {self.parts}, "
                f"as exact needs"
            )

    def _split(self, region: Region) -> None:
        for node in region.enter:
            for operand in node.all_input_nodes[1:]:
                self._cut(node, operand, 0)
        for cut in region.cuts:
            self._cut(cut.user, cut.operand, cut.axis)
        for node in region.inner:
            if node.target is A.reshape.default and node in region.axes:
                dims: list[Any] = list(type_of(node).dims)
                dims[region.axes[node]] //= self.parts
                node.args = (node.args[0], dims)
        leave = self._gathered if self.exact else self._leave
        leave(region.leave)
        self.fn.retype()

    def _leave(self, node: torch.fx.Node) -> None:
        """A product of parts: summed over the processes, its bias added once."""
        bias = arguments(node)["bias"]
        self._cut(node, arguments(node)["weight"], 1)
        node.args = (node.args[0], node.args[1])
        total = self._after(node, G.all_reduce.default, **self.whose)
        if bias is not None:
            self._after(total, A.add.Tensor, bias)

    def _gathered(self, node: torch.fx.Node) -> None:
        """A product of values in parts, computed for all of them: its outputs are split instead."""
        x, *operands = node.all_input_nodes
        with self.fn.graph.inserting_before(node):
            whole = self.fn.call(G.all_gather.default, x, site=site_of(x), **self.whose)
        node.replace_input_with(x, whole)
        self._split_outputs(node, operands)

    def _split_outputs(self, node: torch.fx.Node, operands: Sequence[torch.fx.Node]) -> None:
        for operand in operands:
            self._cut(node, operand, 0)
        self._after(node, G.all_gather.default, **self.whose)

    def _after(self, node: torch.fx.Node, op: Any, *args: Any, **options: Any) -> torch.fx.Node:
        """A call on a node right behind it, for all that read the node."""
        users = list(node.users)
        with self.fn.graph.inserting_after(node):
            new = self.fn.call(op, node, *args, site=site_of(node), **options)
        for user in users:
            user.replace_input_with(node, new)
        return new

    def head(self) -> int:
        """Split the product that makes logits by vocabulary."""
        if "logits" not in self.fn.outputs:
            return 0
        last = self.fn.calls(G.hidden.default)[-1:]
        needed = cone([self.fn.outputs["logits"]])
        for node in reversed(self.fn.calls(A.linear.default)):
            after = node in needed and (not last or last[0] in cone([node]))
            outputs = type_of(node).dims[-1]
            if not after or not isinstance(outputs, int) or outputs % self.parts:
                continue
            self._split_outputs(node, node.all_input_nodes[1:])
            return 1
        return 0

    def embeddings(self) -> int:
        """Split the tables that tokens are looked up in, by vocabulary."""
        count, tokens = 0, self.fn.input("tokens")
        for node in self.fn.calls(A.embedding.default):
            table, ids = node.all_input_nodes[:2]
            rows = type_of(table).dims[0]
            if ids is not tokens or not isinstance(rows, int) or rows % self.parts:
                continue
            with self.fn.graph.inserting_before(node):
                mine: dict[str, Any] = {"part": self.part, "rows": rows // self.parts}
                found = self.fn.call(G.tokens_part.default, ids, **mine, site=site_of(node))
            self._cut(node, table, 0)
            node.replace_input_with(ids, found)
            some = self._after(node, G.rows_part.default, ids, **mine)
            self._after(some, G.all_reduce.default, **self.whose)
            count += 1
        return count

    def _cut(self, user: torch.fx.Node, operand: torch.fx.Node, axis: int) -> None:
        with self.fn.graph.inserting_before(user):
            user.replace_input_with(operand, self._part_of(operand, axis))

    def _part_of(self, operand: torch.fx.Node, axis: int) -> torch.fx.Node:
        size = type_of(operand).dims[axis]
        assert isinstance(size, int)
        each = size // self.parts
        return self._derived(operand, axis, self.part * each, (self.part + 1) * each, "part")

    def _derived(
        self, operand: torch.fx.Node, axis: int, start: int, end: int, name: str
    ) -> torch.fx.Node:
        """A piece of a weight along an axis."""
        whole = self.weights[str(operand.target)]
        dims = (*whole.type.dims[:axis], end - start, *whole.type.dims[axis + 1 :])
        type, name = TensorType(whole.type.dtype, dims), f"{whole.name}.{name}"
        made = derive(name, type, piece, whole, axis=axis, start=start, end=end)
        known = self.weights.alike(made)
        if known is made:  # the name may be another's, as of a table cut along both axes
            known = replace(made, name=fresh_name(self.weights, name))
        self.weights = self.weights.adding(known)
        return self.fn.weight(known)


def _pieces(node: torch.fx.Node) -> list[tuple[torch.fx.Node, int, int]] | None:
    """(value, first, end) of each piece that a product's outputs are cut into; None if something
    reads them otherwise, or there is one only."""
    outputs = type_of(node).dims[-1]
    axis, found = len(type_of(node).dims) - 1, list[tuple[torch.fx.Node, int, int]]()
    for user in node.users:
        named = arguments(user) if user.target in (A.slice.Tensor, SPLIT) else {}
        if named.get("dim", 0) % (axis + 1) != axis or not isinstance(outputs, int):
            return None
        if user.target is A.slice.Tensor and named["step"] == 1:
            start, end = named["start"] or 0, min(named["end"] or outputs, outputs)
            found.append((user, start, end))
        elif user.target is SPLIT:
            sizes = named["split_sizes"]
            for item in user.users:
                place = item.args[1]
                assert isinstance(place, int)
                found.append((item, sum(sizes[:place]), sum(sizes[: place + 1])))
        else:
            return None
    whole = all(0 <= start < end <= int(str(outputs)) for _, start, end in found)
    return found if whole and len(found) > 1 else None
