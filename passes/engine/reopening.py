"""Weights that a source holds in few bits, as floats for passes that take floats.

Before, as a quantized checkpoint is read, its columns in activation order::

    %g: f32[B,T,64] = aten.index_select(%x, -1, @up.weight.q4.order)
    %y: f32[B,T,96] = graftwork.quantized_linear(%g, @up.weight.q4, @up.weight.q4.scale, bits=4,
      group=32, rounded=False)

After::

    %y: f32[B,T,96] = aten.linear(%x, @up.weight)

The float weight is worked out of the stored one whenever it is loaded; nobody holds it. A pass says
which ones it wants so (`Pass.reopen`), and a recipe's passes never open what another of them has
stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx

from ...ir import (
    Function,
    Program,
    Role,
    Weight,
    WeightStore,
    arguments,
    site_of,
    type_of,
)
from ...ir.ops.quantized import rounding
from ...ir.rewrite.stored import (
    Parts,
    float_weight,
    named_parts,
    parts_of,
    product_sizes,
    stored_in,
    stored_ops,
)
from ...ir.rewrite.subgraph import fresh_name

A, G = torch.ops.aten, torch.ops.graftwork


@dataclass(frozen=True)
class Reopened:
    """What became of weights that the source holds in few bits. claimed: the names of those that
    the pass has taken, as floats or as they are. kept: how many products and look-ups stay as they
    are because that is what the pass would make. remarks: see `Outcome`."""

    program: Program
    claimed: frozenset[str] = frozenset()
    kept: int = 0
    remarks: tuple[str, ...] = ()


Wants = Callable[[Function, torch.fx.Node, tuple[Weight, ...]], str]
"""Whether a call is wanted with the float weights that its stored ones stand for: "floats", "stays"
(it is as the pass would make it), or "" (it is none of the pass's)."""


def stored_names(program: Program) -> frozenset[str]:
    """The names of all weights that are multiplied, or looked up, in few bits."""
    functions = program.functions.values()
    return frozenset(
        name for fn in functions for call in fn.calls(*stored_ops()) for name in names_of(call)
    )


def float_name(name: str, bits: int) -> str:
    """What the float weight is called that a stored one stands for."""
    return name.removesuffix(f".q{bits}")


def reopened(
    program: Program,
    held: frozenset[str],
    wants: Wants,
    *,
    what: str,
    roles: frozenset[Role] = frozenset({Role.TARGET}),
    rounded: bool = False,
    span: int = 0,
) -> Reopened:
    """The program with those calls on floats that are wanted so. held: the names of weights that
    the source has stored. what: the pass does with them, for the report. rounded, span: how
    products that stay round their activations to int8, see `rounding`."""
    functions, opener = dict(program.functions), _Opener(program.weights)
    claimed, bits, kept = set[str](), Counter[int](), Counter[int]()
    for name, function in program.functions.items():
        if function.role not in roles:
            continue
        fn = function.copy()
        for call in list(fn.calls(*stored_ops())):
            if not held.issuperset(names_of(call)):
                continue
            floats = opener.weights_of(call)
            answer, width = wants(fn, call, floats), int(arguments(call)["bits"])
            if not answer:
                continue
            claimed.update(names_of(call))
            if answer == "stays":
                kept[width] += 1
                if "rounded" in arguments(call):
                    rest = {k: v for k, v in call.kwargs.items() if k not in ("rounded", "span")}
                    call.kwargs = rest | rounding(rounded, span, *product_sizes(call))
                continue
            bits[width] += 1
            opener.open(fn, call, floats)
        fn.graph.eliminate_dead_code()
        functions[name] = fn
    remarks = [
        said.format(", ".join(f"{n} of {b} bits" for b, n in sorted(counts.items())))
        for said, counts in (
            (f"weights that the source holds in few bits are {what}: {{}}", bits),
            ("weights that the source holds in as many bits stay as they are: {}", kept),
        )
        if counts
    ]
    if not claimed:
        return Reopened(program)
    changed = program.replace(functions=functions, weights=opener.weights)
    return Reopened(changed, frozenset(claimed), kept.total(), tuple(remarks))


def names_of(call: torch.fx.Node) -> tuple[str, ...]:
    """The names of a call's stored weights; none of what is no weight."""
    nodes = [arguments(call)[name] for name in stored_in(call)]
    there = all(node.op == "get_attr" for node in nodes)
    return tuple(str(node.target) for node in nodes) if there else ("",)


class _Opener:
    """Float weights of stored ones, each made once, and the calls on them."""

    def __init__(self, weights: WeightStore) -> None:
        self.weights = weights
        self.made: dict[str, Weight] = {}

    def weights_of(self, call: torch.fx.Node) -> tuple[Weight, ...]:
        """The float weights that a call's stored ones stand for, columns in order."""
        looked_up = call.target is G.quantized_embedding.default
        dtype = torch.float32 if looked_up else type_of(arguments(call)["x"]).dtype
        product = call.target is G.quantized_linear.default
        order = {"order": _gathered(arguments(call)["x"])[1]} if product else {}
        named = (parts_of(call, weight) | order for weight in stored_in(call))
        return tuple(self._weight(parts, int(arguments(call)["bits"]), dtype) for parts in named)

    def _weight(self, parts: Parts, bits: int, dtype: torch.dtype) -> Weight:
        inputs = named_parts(parts, self.weights)
        packed = inputs["weight"].name
        key = f"{packed} {dtype}"
        if key not in self.made:
            name = fresh_name(self.weights, float_name(packed, bits))
            self.made[key] = float_weight(name, inputs, bits, dtype)
        return self.made[key]

    def open(self, fn: Function, call: torch.fx.Node, floats: tuple[Weight, ...]) -> None:
        """Put a call on floats in its place."""
        self.weights = self.weights.adding(*floats)
        given, site = arguments(call), site_of(call)
        with fn.graph.inserting_before(call):
            stacks = [fn.weight(weight) for weight in floats]
            if call.target is G.quantized_moe.default:
                read = [given[name] for name in ("x", "experts", "weights")]
                named = "gate_up_bias", "down_bias", "activation", "limit", "alpha"
                options = {name: given[name] for name in named}
                new = fn.call(G.moe.default, *read, *stacks, site=site, **options)
            elif call.target is G.quantized_embedding.default:
                new = fn.call(A.embedding.default, *stacks, given["ids"], site=site)
            else:
                x, _ = _gathered(given["x"])
                new = fn.call(A.linear.default, x, *stacks, bias=given["bias"], site=site)
        fn.replace(call, new)


def _gathered(x: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node | None]:
    """What a product reads, its channels in order, and the weight that says in which order the
    stored columns have them; None: they are in order."""
    if x.target is not A.index_select.default:
        return x, None
    source, axis, order = (x.args[place] for place in range(3))
    assert isinstance(source, torch.fx.Node) and isinstance(order, torch.fx.Node)
    rank = len(type_of(source).dims)
    last = isinstance(axis, int) and axis % rank == rank - 1
    return (source, order) if last and order.op == "get_attr" else (x, None)
