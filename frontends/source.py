"""Models that write from a source: an encoder's trace and a decoder's become one program.

Before, as traced::

    func encode(tokens: i64[B,T], positions, lengths) -> source f32[B,T,H]
    func step(tokens: i64[B,T], positions, source: f32[B,N,H], lengths) -> logits f32[B,T,V] {
      %k = ...                                        f32[B,H,N,D], of the source alone
      %y = graftwork.source_attention(%q, %k, %v, %lengths, layer=0, scale=0.125)

After::

    func encode(tokens, positions, lengths) -> cross.0.key f32[B,H,T,D], cross.0.value, ...
    func step(tokens, positions, lengths, cross.0.key: f32[B,H,N,D], ...) -> logits f32[B,T,V] {
      %y = graftwork.source_attention(%q, %cross.0.key, %cross.0.value, %lengths, ...)

So a source is read once, and steps find keys and values made. Refuses steps that read their source
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from ..ir import (
    DecodePlan,
    Dim,
    Function,
    ModelInfo,
    Program,
    Sym,
    UnsupportedError,
    Weight,
    WeightStore,
    arguments,
    site_of,
    type_of,
)
from ..ir.plan import Encoded
from .importer import Imported
from .mark_hidden import mark_hidden
from .program import described, settle
from .regions import needed_for, reached_from

G = torch.ops.graftwork
LOOK_UP = torch.ops.aten.embedding.default
SOURCE = "source"
"""What the encoder's trace returns and the decoder's takes."""


def build_with_source(
    name: str,
    encode: Imported,
    step: Imported,
    info: ModelInfo,
    plan: Encoded,
    assets: Mapping[str, Path],
) -> Program:
    """The program of a model that writes from a source, at stage "traced".

    plan: of the source; its `most` is the number of positions that the encoder is asked to have,
    and its `vocabulary` what the encoder turns out to have.
    Errors: `UnsupportedError` as `build_program`, and for steps that read their source otherwise
    than by attention.
    """
    most, context = settle(encode, plan.most), settle(step, info.context)
    _keep_apart(encode, step)
    _move_projections(encode, step)
    mark_hidden(step.fn)
    info = described(step, replace(info, context=context), name)
    functions = {fn.name: fn for fn in (step.fn, encode.fn)}
    weights = WeightStore({**encode.weights, **step.weights})
    source = replace(plan, most=most, vocabulary=_vocabulary(encode.fn))
    return Program(
        name, functions, weights, info, plan=DecodePlan(source=source), assets=dict(assets)
    ).pruned()


def _vocabulary(encode: Function) -> int:
    """Tokens that the encoder has rows for; 0 where it reads none."""
    if not encode.has_input("tokens"):
        return 0
    tables = [node.args[0] for node in encode.input("tokens").users if node.target is LOOK_UP]
    sizes = [type_of(table).dims[0] for table in tables if isinstance(table, torch.fx.Node)]
    if not sizes:
        raise UnsupportedError("the encoder does not look its tokens up in a table")
    return min(int(str(size)) for size in sizes)


def _keep_apart(encode: Imported, step: Imported) -> None:
    """Rename what was made for the encoder and is called as something else of the step."""
    for node in encode.fn.graph.find_nodes(op="get_attr"):
        weight = encode.weights[str(node.target)]
        if weight.name in step.weights and step.weights[weight.name] is not weight:
            own = weight.renamed(f"{encode.fn.name}.{weight.name}")
            encode.weights[own.name] = own
            node.target = own.name


def _move_projections(encode: Imported, step: Imported) -> None:
    """Give what the step computes of the source alone to the encoder."""
    mover = _Mover(encode, step)
    reach = reached_from(step.fn, step.fn.input("tokens"))
    outputs: dict[str, torch.fx.Node] = {}
    for node in step.fn.calls(G.source_attention.default):
        given = arguments(node)
        for part, value in (("key", given["k"]), ("value", given["v"])):
            if value in reach:
                raise UnsupportedError(
                    f"{site_of(node).module}: attention that lets tokens see later ones; expected "
                    "a decoder whose own attention is causal"
                )
            name = f"cross.{given['layer']}.{part}"
            outputs[name] = mover.moved(value)
            node.replace_input_with(value, step.fn.add_input(name, type_of(value)))
    encode.fn.set_outputs(outputs)
    step.fn.graph.eliminate_dead_code()
    source = step.fn.input(SOURCE)
    if source.users or not outputs:
        raise UnsupportedError(
            "the decoder reads its source otherwise than by attention, or not at all; expected "
            "cross-attention in its layers"
        )
    step.fn.graph.erase_node(source)


class _Mover:
    """Copies values of the step that follow from the source to where the encoder makes that."""

    def __init__(self, encode: Imported, step: Imported) -> None:
        self.encode, self.step = encode, step
        made = encode.fn.outputs[SOURCE]
        self.values: dict[torch.fx.Node, torch.fx.Node] = {step.fn.input(SOURCE): made}
        self.rows: dict[str, Dim] = {"N": type_of(made).dims[1]}
        self.weights: dict[str, torch.fx.Node] = {}

    def moved(self, value: torch.fx.Node) -> torch.fx.Node:
        """The value in the encoder."""
        fn = self.encode.fn
        with fn.graph.inserting_before(fn.output_node):
            for node in needed_for(value, self.values):
                self.values[node] = self._copy(fn, node)
        return self.values[value]

    def _copy(self, fn: Function, node: torch.fx.Node) -> torch.fx.Node:
        if node.op == "get_attr":
            return self._weight(fn, self.step.weights[str(node.target)])
        if node.op != "call_function":
            raise UnsupportedError(f"the decoder's keys depend on its input {node.target}")
        args: Any = map_aggregate(node.args, self._bound)
        kwargs: Any = map_aggregate(node.kwargs, self._bound)
        return fn.call(node.target, *args, site=site_of(node), **kwargs)  # type: ignore[arg-type]

    def _bound(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.values[arg]
        return arg.bind(self.rows) if isinstance(arg, Sym) else arg

    def _weight(self, fn: Function, weight: Weight) -> torch.fx.Node:
        if weight.name not in self.weights:
            self.encode.weights[weight.name] = weight
            self.weights[weight.name] = fn.weight(weight)
        return self.weights[weight.name]
