"""Store weights in a few bits, with a scale for each group of values.

Before::

    %h: f32[B,T,64] = aten.embedding(@embed, %tokens)
    %y: f32[B,T,96] = aten.linear(%h, @up.weight)

After, with 4 bits for layers and 8 for the embedding, in groups of 32::

    %h: f32[B,T,64] = graftwork.quantized_embedding(%tokens, @embed.q8, @embed.q8.scale,
      @embed.q8.offset, bits=8, group=32)
    %y: f32[B,T,96] = graftwork.quantized_linear(%h, @up.weight.q4, @up.weight.q4.scale,
      @up.weight.q4.offset, bits=4, group=32)

Activations are rounded by row (see `ir.ops.quantized`), so a token's result is the same whatever
shares its step, and speculation on a quantized model stays lossless with respect to that model. How
the bits lie, `ir.numerics` says. Functions that only draft follow the same options; `role` gives
them their own. A recipe may have the pass several times: each takes what is still float.

Refuses a program without float weights to take, a pattern that names no weight, and rows that the
group does not divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

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
from ...ir.numerics import Numeric
from ..engine.base import STATES, Contract, Effect, Outcome, Pass, register
from ..engine.functions import EVERY, edit_with_weights
from ..engine.subgraph import fresh_name
from ..fusing.dce import sweep
from ..fusing.products import product_of, source_product

A, G = torch.ops.aten, torch.ops.graftwork
TOKENS = "tokens"
SCALES = {"f16": torch.float16, "f32": torch.float32}


@register
class QuantizeWeights(Pass):
    """bits: of a value. group: values of a row that share a scale; 0: all of it. symmetric: zero is
    stored exactly, and groups have no offset. method: how values are chosen; rtn rounds to nearest.
    scales: what scales and offsets are stored as. embedding: whether the table that tokens are
    looked up in and the head that gives logits are quantized, tied or not; or in how many bits.
    select, exclude: of these, only, or not, the weights with these names (shell patterns).
    rounded: activations are rounded to int8 by row; if not, products are float. role: only weights
    of functions whose results count (target), or are verified (draft).
    """

    bits: Literal[2, 3, 4, 6, 8] = 4
    group: Annotated[int, Field(ge=0)] = 32
    symmetric: bool = False
    method: Literal["rtn"] = "rtn"
    scales: Literal["f16", "f32"] = "f16"
    embedding: bool | Literal[2, 3, 4, 6, 8] = False
    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rounded: bool = True
    role: Literal["any", "target", "draft"] = "any"

    name: ClassVar[str] = "quantize_weights"
    contract: ClassVar[Contract] = Contract.APPROXIMATE
    requires: ClassVar[frozenset[str]] = frozenset({"canonical"})
    provides: ClassVar[frozenset[str]] = frozenset({"quantized"})
    effects: ClassVar[frozenset[Effect]] = frozenset({Effect.WEIGHT_NUMERICS})
    reads: ClassVar[frozenset[Effect]] = STATES | {Effect.FUNCTIONS}
    repeatable: ClassVar[bool] = True

    def run(self, program: Program) -> Outcome:
        """Quantize every float weight that is chosen, wherever it is multiplied or looked up."""
        self._check_patterns(program)
        vocabulary = frozenset(_vocabulary(program))
        roles = EVERY if self.role == "any" else frozenset({Role(self.role)})

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            return self._quantize(fn, weights, vocabulary)

        return edit_with_weights(program, edit, roles)

    def _quantize(
        self, fn: Function, weights: WeightStore, vocabulary: frozenset[str]
    ) -> tuple[int | str, WeightStore]:
        calls = fn.calls(A.linear.default, A.embedding.default)
        given = [(node, weight) for node in calls if (weight := _weight_of(node, weights))]
        found = [(n, weight) for n, weight in given if self._takes(n, weight, vocabulary)]
        if not found:
            return (
                f"{len(given)} float weights are multiplied or looked up, none is chosen",
                weights,
            )
        for node, weight in found:
            numeric = self._numeric(weight, weight.name in vocabulary)
            stored, weights = _stored(weight, numeric, weights)
            self._replace(fn, node, stored, numeric)
        sweep(fn)
        return len(found), weights

    def _takes(self, node: torch.fx.Node, weight: Weight, vocabulary: frozenset[str]) -> bool:
        known = weight.name in vocabulary
        if node.target is A.embedding.default and not known:
            return False  # a table of positions
        named = not self.select or _matches(weight.name, self.select)
        chosen = named and not _matches(weight.name, self.exclude)
        return chosen and (self.embedding is not False or not known)

    def _numeric(self, weight: Weight, known: bool) -> Numeric:
        """How a weight is stored. Errors: `PassError` for a group that does not divide its rows."""
        columns = int(str(weight.type.dims[1]))
        kind: Literal["symmetric", "affine"] = "symmetric" if self.symmetric else "affine"
        bits = self.embedding if known and self.embedding is not True else self.bits
        numeric = Numeric(bits, self.group or columns, kind, SCALES[self.scales])
        if why := numeric.refusal(columns):
            raise PassError(f"quantize_weights: {weight.name}: {why} (exclude: [{weight.name!r}])")
        return numeric

    def _check_patterns(self, program: Program) -> None:
        for pattern in (*self.select, *self.exclude):
            if not any(fnmatchcase(name, pattern) for name in program.weights):
                raise PassError(
                    f"quantize_weights: the pattern {pattern!r} names no weight of "
                    f"{program.name}; its weights look like {next(iter(program.weights), '')!r}"
                )

    def _replace(
        self, fn: Function, node: torch.fx.Node, stored: tuple[Weight, ...], numeric: Numeric
    ) -> None:
        looked_up = node.target is A.embedding.default
        source = node.args[1] if looked_up else node.args[0]
        bias = () if looked_up or len(node.args) < 3 or node.args[2] is None else node.args[2:]
        missing = [None] * (5 - 1 - len(stored)) if bias else []
        options: dict[str, Any] = {"bits": numeric.bits, "group": numeric.group}
        if not looked_up and not self.rounded:
            options["rounded"] = False
        op = G.quantized_embedding if looked_up else G.quantized_linear
        with fn.graph.inserting_before(node):
            parts = [source, *map(fn.weight, stored), *missing, *bias]
            new = fn.call(op.default, *parts, site=site_of(node), **options)
            if type_of(new) != type_of(node):  # tables give float32
                new = fn.call(A._to_copy.default, new, dtype=type_of(node).dtype)
        node.replace_all_uses_with(new)
        fn.graph.erase_node(node)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _vocabulary(program: Program) -> Iterator[str]:
    """Names of the tables that tokens are looked up in, and of the head's weight."""
    for fn in program.functions.values():
        for node in fn.calls(A.embedding.default):
            ids = node.args[1]
            if isinstance(ids, torch.fx.Node) and ids.op == "placeholder" and ids.target == TOKENS:
                yield _weight_name(node)
    head = source_product(program.step.outputs.get("logits"))
    if product_of(head):
        yield _weight_name(head)


def _weight_name(node: torch.fx.Node) -> str:
    """The name of the weight that a product multiplies with, or a look-up looks up; or ""."""
    source = node.args[0 if node.target is A.embedding.default else 1]
    known = isinstance(source, torch.fx.Node) and source.op == "get_attr"
    return str(source.target) if known else ""  # type: ignore[union-attr]


def _weight_of(node: torch.fx.Node, weights: WeightStore) -> Weight | None:
    """The same as a weight, if that is a float one [N,K]."""
    name = _weight_name(node)
    type = weights[name].type if name else None
    plain = type is not None and type.dtype.is_floating_point and len(type.dims) == 2
    return weights[name] if plain else None


def _stored(
    weight: Weight, numeric: Numeric, weights: WeightStore
) -> tuple[tuple[Weight, ...], WeightStore]:
    """A weight's bits, scales and offsets, computed when loaded, and the store with them."""
    rows, columns = (int(str(dim)) for dim in weight.type.dims)
    packed, scale = numeric.types(rows, columns)
    name = f"{weight.name}.q{numeric.bits}"
    kinds = [("", packed), (".scale", scale)]
    kinds += [(".offset", scale)] if numeric.kind == "affine" else []
    parts = []
    for place, (suffix, type) in enumerate(kinds):
        part = _part(fresh_name(weights, name + suffix), type, weight, numeric, place)
        part = weights.alike(part)
        weights = weights.adding(part)
        parts.append(part)
    return tuple(parts), weights


def _part(name: str, type: TensorType, weight: Weight, numeric: Numeric, place: int) -> Weight:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        found = numeric.quantize(tensor)[place]
        assert found is not None
        return found

    return derive(name, type, part, weight, key=("quantized", numeric, place))
