"""Let prompts run through the first layers alone, which predict the rows of the others.

Before::

    func step(tokens: i64[B,T], positions, past: i64[B], kv.0.key: f32[B,G,C,D], ...) -> ... {
      %k0: f32[B,G,T,D] = graftwork.rotary(%p0, %cos, %sin)
      %kw: f32[B,G,C,D] = graftwork.cache_write(%kv.0.key, %k0, %past)
      ... layer 0's attention, and layer 1 ...

After (layers=1)::

    func step(...) as it was
    func predict(tokens: i64[B,T], positions, past: i64[B], kv.0.key: f32[B,G,C,D], ...) -> ... {
      ... layer 0 up to its rows, as in step ...
      %x: f32[B,T,G*2D] = aten.cat([%p0's rows, %v0's rows], 2)
      %y: f32[B,T,G*D] = aten.linear(%x, @kv.1.key.predictor, @kv.1.key.predictor_bias)
      %r: f32[B,T,G*D] = aten.where(%positions == 0, @kv.1.key.first, %y)
      %k1: f32[B,G,T,D] = graftwork.rotary(%r as heads, %cos, %sin)
      %kw1: f32[B,G,C,D] = graftwork.cache_write(%kv.1.key, %k1, %past)
      ... values in the same way; no attention of layer 1, and no logits ...
    decode {
      step = predicted(function="step", predict="predict")

A prompt goes through `predict` up to its last token, and that one, as all that follow, through the
whole step. Keys are predicted before they are turned for their positions. The linear maps solve
least squares on text, with a small penalty, when the program is made; the report says how much of
what each layer's rows vary by they leave unexplained. A text's first token is where attention goes
that has nowhere to go: its rows are like no others, and like each other whatever it is. The maps
learn from the rest, and where its rows' mean is nearer than what they make, it gets that. Source:
Horton et al., "KV Prediction for Improved Time to First Token" (2024).

Refuses programs whose prompts run otherwise already, with recurrences, or whose texts are written
from a source; caches that another pass moves rows of; as many layers as there are, or more; and
text that has fewer tokens than a map has inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
import torch.fx
from pydantic import Field

from ...ir import Function, Program, Weight, type_of
from ...ir.plan import NoSource, Predicted, Whole
from ...ir.rewrite.subgraph import beyond
from ..engine.base import Effect, Evidence, Outcome, Windows, register
from ..engine.feed import watched
from .cached_rows import CachedRows, Written, written
from .contents import LearnedContents

A, G = torch.ops.aten, torch.ops.graftwork
PREDICT, POSITIONS = "predict", "positions"
Size = Annotated[int, Field(ge=1, le=4096)]


@register
class PredictCache(LearnedContents):
    """layers: that prompts run through, the first ones, or below 1 the share of all that these are.
    sources: of those, the last ones, whose keys and values the others' are predicted from. windows,
    length: of text (see `LearningPass`)."""

    layers: Annotated[float, Field(gt=0, le=4096)] = 0.5
    sources: Size = 1
    windows: Windows = 16

    effects: ClassVar[frozenset[Effect]] = LearnedContents.effects | {
        Effect.FUNCTIONS,
        Effect.DECODE_PLAN,
    }

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        if not list(written(program.step, program)):
            return Outcome(program, 0, f"{program.step.name} writes no rows that attention reads")
        first = self._checked(program)
        found = self._learned(program, first, evidence.sampled(self.sample, program))
        weights = dict[str, Weight]()
        for name, linear in found.items():
            parts = {"predictor": linear.weight, "predictor_bias": linear.bias}
            if linear.first is not None:
                parts["first"] = linear.first
            for part, tensor in parts.items():
                weights[f"{name}.{part}"] = Weight.of(f"{name}.{part}", tensor.to(linear.dtype))
        fn = _predicting(program, first, self.sources, weights)
        plan = Predicted(program.step.name, fn.name).into(program.plan)
        made = program.replace(weights=program.weights.adding(*weights.values()))
        left = ", ".join(f"{name} {linear.left:.2f}" for name, linear in found.items())
        remark = f"of the variance of rows, left unexplained: {left}"
        return Outcome(made.with_function(fn).replace(plan=plan), len(found), remarks=(remark,))

    def _checked(self, program: Program) -> int:
        """How many caches belong to layers that prompts run through. Errors: `PassError`."""
        plan, step = program.plan, program.step
        self.refuse_other(program, "whose rows come from the whole step")
        self.refuse(
            program.recurrent,
            f"{program.name} has recurrences, which hold what all rows add up to: no rows of those "
            f"can be predicted",
        )
        self.refuse(
            plan.source != NoSource(),
            f"texts are written from a source ({plan.source.brief}), and rows are predicted from "
            f"tokens alone",
        )
        self.refuse(
            plan.step != Whole(step.name) or PREDICT in program.functions,
            f"expected a plan whose step is the function {step.name!r} alone, and no function "
            f"{PREDICT!r}; the plan has step={plan.step.brief}",
        )
        layers = [program.states[write.names[0]].layer for write in written(step, program)]
        there = sorted(set(layers))
        count = int(self.layers if self.layers >= 1 else self.layers * len(there))
        self.refuse(
            not (0 < count < len(there) and self.layers in (count, self.layers % 1)),
            f"layers={self.layers:g}: prompts would run through {count} of {len(there)} layers "
            f"with caches; expected some, and fewer than all, or a share of them",
        )
        self.refuse(
            layers != sorted(layers),
            f"{step.name} writes layers' rows in the order {layers}: the first ones are not whole "
            f"before the others begin",
        )
        return sum(layer in there[:count] for layer in layers)

    def _learned(self, program: Program, first: int, windows: torch.Tensor) -> dict[str, Linear]:
        """Of every state that is predicted, what predicts it."""
        caches = list(written(program.step, program))
        nodes = {rows.names[0]: _plain(rows) for rows in _rows(caches)}
        near = [rows.names[0] for rows in _sources(caches, first, self.sources)]
        wanted = [rows.names[0] for rows in _rows(caches[first:])]
        plain = {f"plain.{name}": node for name, node in nodes.items()}
        texts = list(watched(program, program.step, plain, windows))
        # [windows,tokens,G*D]
        seen = {
            n: torch.stack([_flat(text[f"plain.{n}"]).float() for text in texts]) for n in nodes
        }
        apart = int(program.step.has_input(POSITIONS))
        rest = {name: rows[:, apart:].flatten(0, 1).double() for name, rows in seen.items()}
        inputs = torch.cat([rest[name] for name in near], 1)
        self.refuse(
            inputs.shape[1] >= inputs.shape[0],
            f"{inputs.shape[0]} tokens of text say too little of maps with {inputs.shape[1]} "
            f"inputs: set windows and length",
        )
        maps = solved(inputs, [rest[name] for name in wanted])
        begun = torch.cat([seen[name][:, 0] for name in near], 1)
        return {
            name: found._replace(
                dtype=type_of(nodes[name]).dtype,
                first=_first(seen[name][:, 0], begun, found) if apart else None,
            )
            for name, found in zip(wanted, maps, strict=True)
        }


def _first(rows: torch.Tensor, inputs: torch.Tensor, linear: Linear) -> torch.Tensor | None:
    """The mean f32[G*D] of rows of first tokens f[N,G*D], unless the map makes them better."""
    count, mean = len(rows), rows.mean(0)
    if count == 1:
        return None
    by_map = rows - torch.nn.functional.linear(inputs, linear.weight, linear.bias)
    # What is left of rows that a mean has not seen.
    by_mean = (rows - mean).square().sum() * (count + 1) / (count - 1)
    return mean if by_mean < by_map.square().sum() else None


def _plain(rows: CachedRows) -> torch.fx.Node:
    """What a step's rows f[B,G,T,D] are before they are turned for their positions."""
    return _place(rows)[0]


def _place(rows: CachedRows) -> tuple[torch.fx.Node, torch.fx.Node]:
    """The rows before they are turned, and the call that takes them."""
    user, node = rows.writes[0], rows.writes[0].args[1]
    assert isinstance(node, torch.fx.Node)
    if node is not rows.new:  # a result of what stores them in few bits
        user, node = node.all_input_nodes[0], rows.new
    if node.target is G.rotary.default:
        user, node = node, node.args[0]
    return node, user


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Rows f[1,G,T,D] as f[T,G*D]."""
    return rows[0].transpose(0, 1).flatten(1)


def _rows(caches: Sequence[Written]) -> list[CachedRows]:
    """Keys and values of every layer."""
    return [rows for cache in caches for rows in (cache.keys, cache.values)]


def _sources(caches: Sequence[Written], first: int, count: int) -> list[CachedRows]:
    """Those that predict others."""
    return _rows(caches[max(first - count, 0) : first])


def _predicting(
    program: Program, first: int, sources: int, weights: Mapping[str, Weight]
) -> Function:
    """The step for the first caches, and predictions for the others."""
    fn = program.step.copy()
    caches = list(written(fn, program))
    nodes = [_plain(rows) for rows in _sources(caches, first, sources)]
    far = _rows(caches[first:])
    places = {node: n for n, node in enumerate(fn)}
    users = [_place(rows)[1] for rows in far]
    with fn.graph.inserting_before(min(users, key=places.__getitem__)):
        flat = [_as_row(fn, node) for node in nodes]
        inputs = fn.call(A.cat.default, flat, 2)
        begins = [_begins(fn)] if fn.has_input(POSITIONS) else []
        for rows, user in zip(far, users, strict=True):
            name, (node, _) = rows.names[0], _place(rows)
            maps = [
                fn.weight(weights[f"{name}.{part}"]) for part in ("predictor", "predictor_bias")
            ]
            row = fn.call(A.linear.default, inputs, *maps)
            if (first_row := weights.get(f"{name}.first")) is not None:
                row = fn.call(A.where.self, begins[0], fn.weight(first_row), row)
            user.replace_input_with(node, _as_heads(fn, row, node))
    states = [name for name in fn.outputs if name in program.states]
    kept = beyond(fn, {}, states)
    return Function(PREDICT, kept.graph, program.step.role)


def _begins(fn: Function) -> torch.fx.Node:
    """Whether tokens are the first of their texts, bool[B,T,1]."""
    there = fn.call(A.eq.Scalar, fn.input(POSITIONS), 0)
    return fn.call(A.unsqueeze.default, there, 2)


def _as_row(fn: Function, rows: torch.fx.Node) -> torch.fx.Node:
    """Rows f[B,G,T,D] as f[B,T,G*D]."""
    batch, heads, tokens, width = type_of(rows).dims
    turned = fn.call(A.permute.default, rows, [0, 2, 1, 3])
    return fn.call(A.reshape.default, turned, [batch, tokens, int(str(heads)) * int(str(width))])


def _as_heads(fn: Function, row: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
    """f[B,T,G*D] as rows f[B,G,T,D]."""
    batch, heads, tokens, width = type_of(like).dims
    parted = fn.call(A.reshape.default, row, [batch, tokens, heads, width])
    return fn.call(A.permute.default, parted, [0, 2, 1, 3])


PENALTY = 1e-6
"""Of the least squares, over the inputs' mean square."""


class Linear(NamedTuple):
    """weight f32[G*D,inputs], bias f32[G*D], the share of the variance that they leave, the dtype
    in which they run, and the row of a text's first token, f32[G*D]; None: as of all others."""

    weight: torch.Tensor
    bias: torch.Tensor
    left: float
    dtype: torch.dtype = torch.float32
    first: torch.Tensor | None = None


def solved(inputs: torch.Tensor, wanted: Sequence[torch.Tensor]) -> list[Linear]:
    """Least squares of each of the `wanted` f64[N,O] from `inputs` f64[N,I], about their means."""
    middle = inputs.mean(0)
    centred = inputs - middle
    square = centred.T @ centred
    square += PENALTY * square.diagonal().mean().clamp(min=1e-12) * torch.eye(len(square))
    factor = torch.linalg.cholesky(square)
    made = []
    for rows in wanted:
        mean = rows.mean(0)
        weight = torch.cholesky_solve(centred.T @ (rows - mean), factor).T
        rest = (rows - mean - centred @ weight.T).square().sum()
        varies = (rows - mean).square().sum().clamp(min=1e-12)
        made.append(Linear(weight.float(), (mean - weight @ middle).float(), float(rest / varies)))
    return made
