"""Turns a program's step into the decode graph that other loaders of ONNX models know.

Before (names and types of graftwork)::

    func step(tokens: i64[B,T], positions: i64[B,T], past: i64[B], kv.0.key: f32[B,G,C,D], ...)
      -> logits f32[B,S,V], argmax, kv.0.key, ...

After::

    func model(input_ids: i64[B,T], attention_mask: i64[B,P], past_key_values.0.key: f32[B,G,C,D],
      ...) -> logits f32[B,T,V], present.0.key, ...

Logits come for every token. `attention_mask` has a column for every token so far, this step's
included: one, or zero for padding, which may stand anywhere (on the left, as transformers has it,
or on the right, as onnxruntime-genai has it); lengths and positions are counted from it. If
GroupQueryAttention can do all attention, it appends to its cache (in place, if the loader binds one
buffer to past and present). It takes rows for texts without gaps, so a step's padding goes behind
its real tokens, whose rows it leaves alone and which the next step writes over; logits come in the
order of the inputs. Else all attention concatenates, and what is padding is masked.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx

from ...ir import (
    Function,
    Program,
    Site,
    Sym,
    UnsupportedError,
    WeightStore,
    arguments,
    site_of,
    type_of,
)
from ...ir.ops.attention import SPANS
from ...ir.rewrite.cleanup import merge_equal, sweep
from ...ir.types import Dim, TensorType
from .attention import SEQLENS, TOTAL, lower_attention
from .calls import source_of
from .lower import drop_ancestors, erase_markers, finish
from .norms import fuse_norms
from .step_limits import refuse_inputs, refuse_more, refuse_moves
from .views import simplify_views

A = torch.ops.aten
G = torch.ops.graftwork

TOKENS, MASK, SELECT = "input_ids", "attention_mask", "select"
B, T, C, P = Sym("B"), Sym("T"), Sym("C"), Sym("P")


@dataclass(frozen=True)
class Layer:
    """One attention: query heads, key-value groups, widths of keys and values."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Portable:
    """The function `model` in ops with rows, its weights, and what loaders must be told.

    in_place: past and present may be one buffer.
    """

    function: Function
    weights: WeightStore
    in_place: bool
    layers: tuple[Layer, ...]


def portable(program: Program, *, plain: bool = False, contrib: bool = True) -> Portable:
    """See the module docstring. plain: leave out what the program drafts with. contrib: the graph
    may have ops of ONNX Runtime's own domain; without them all attention concatenates.

    Errors: `UnsupportedError` for a program that drafts, unless `plain`, for one whose caches lose
    or move rows, and for one without logits
    or caches, with states that are not keys and values, or with attention that reads them through
    something else than a step mask.
    """
    step = program.step
    refuse_moves(program)
    refuse_inputs(program)
    if not plain:
        refuse_more(program)
    else:
        # What drafts, or runs in parts, has states that are nothing of the step's.
        own = {name: state for name, state in program.states.items() if step.has_input(name)}
        program = program.replace(states=own)
    layers = _numbered(program)
    fn = step.copy()
    fn.name = "model"
    erase_markers(fn)
    drop_ancestors(fn)
    _all_logits(fn, program)
    sweep(fn)
    merge_equal(fn)
    simplify_views(fn)
    weights = program.weights
    if contrib:
        fn, weights = _lowered(fn, weights)
    shapes = _layers(fn)
    concatenates = bool(fn.calls(G.attend.default))
    if concatenates:
        _drop_picks(fn)
    _Counter(fn, concatenates).run()
    if contrib:
        fuse_norms(fn)
    simplify_views(fn)
    finish(fn)
    _rename(fn, program, layers)
    return Portable(fn, weights.only(fn.weights), not concatenates, shapes)


def concatenated(program: Program, name: str, contrib: bool = False) -> Program:
    """A program with only the function `name`, whose attention ONNX has itself: it takes
    `attention_mask` and caches without spare rows, and returns them longer, as the graphs above;
    names and outputs stay as they are, and so do the positions given. contrib: norms may be of ONNX
    Runtime's own domain.

    Errors: `UnsupportedError` for attention that reads its cache through something else than a step
    mask.
    """
    fn = _plain_chain(program, name)
    if fn.calls(G.attend.default):
        _Counter(fn, True, kept=("positions",)).run()
    if contrib:
        fuse_norms(fn)
    simplify_views(fn)
    finish(fn)
    return program.replace(functions={name: fn}).pruned()


def is_concatenable(program: Program, name: str) -> bool:
    """Whether all attention of a function is such that `concatenated` can do, without sinks, which
    ONNX's own does not have, or a bias, which counts rows."""
    attention = _plain_chain(program, name).calls(G.attend.default)
    extras = [arguments(node)[part] for node in attention for part in ("sinks", "bias")]
    masked = bool(attention) and all(map(_reads_step_mask, attention))
    return masked and all(extra is None for extra in extras)


def _plain_chain(program: Program, name: str) -> Function:
    """A copy of a function, of tokens that follow one another."""
    fn = program.function(name).copy()
    erase_markers(fn)
    drop_ancestors(fn)
    sweep(fn)
    merge_equal(fn)
    simplify_views(fn)
    return fn


def _reads_step_mask(node: torch.fx.Node) -> bool:
    """Whether attention reads what was just written to two caches, through a step mask."""
    given = arguments(node)
    mask, bias = given["mask"], given["bias"]
    targets = [given["k"].target, given["v"].target, mask.target]
    plain = targets == [G.cache_write.default] * 2 + [G.step_mask.default]
    plain = plain and arguments(mask)["row_positions"] is None
    return plain and (bias is None or bias.target is G.alibi.default)


def _numbered(program: Program) -> dict[int, int]:
    """Layers that have caches, numbered without gaps. Errors: see `portable`."""
    strange = [name for name, s in program.states.items() if s.part not in ("key", "value")]
    outputs = program.step.outputs
    if "logits" not in outputs or not program.states or strange:
        found = f"states {', '.join(strange)}" if strange else f"outputs {', '.join(outputs)}"
        raise UnsupportedError(
            f"{program.name} cannot become a plain decode graph: expected a step with logits whose "
            f"states are keys and values, got {found}. The formats onnx-loop and onnx-plan carry "
            f"states of other kinds; or export another recipe, such as baseline"
        )
    layers = sorted({state.layer for state in program.states.values()})
    return {layer: index for index, layer in enumerate(layers)}


def _all_logits(fn: Function, program: Program) -> None:
    """Logits of every token, in the order that the input `select` gives, and the states; nothing
    else comes out."""
    if not fn.has_input(SELECT):
        fn.add_input(SELECT, TensorType(torch.int64, (B, T)))
    fn.input(SELECT).meta["type"] = TensorType(torch.int64, (B, T))
    for node in fn.calls():
        node.args = torch.fx.node.map_aggregate(node.args, _every_token)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _every_token)
    fn.retype()
    outputs = fn.outputs
    logits = outputs["logits"]
    if not fn.calls(G.pick_rows.default):
        with fn.graph.inserting_before(fn.output_node):
            logits = fn.call(G.pick_rows.default, logits, fn.input(SELECT), site=site_of(logits))
    fn.set_outputs({"logits": logits, **{name: outputs[name] for name in program.states}})


def _drop_picks(fn: Function) -> None:
    for node in fn.calls(G.pick_rows.default):
        node.replace_all_uses_with(source_of(node))
        fn.graph.erase_node(node)
    simplify_views(fn)


def _lowered(fn: Function, weights: WeightStore) -> tuple[Function, WeightStore]:
    """All attention as GroupQueryAttention, or none: one keeps rows in another order than the
    other."""
    lowered = fn.copy()
    more = lower_attention(lowered, weights, counted=True)
    return (fn, weights) if lowered.calls(G.attend.default) else (lowered, more)


def _every_token(arg: Any) -> Any:
    if not isinstance(arg, Sym) or "S" not in arg.symbols:
        return arg
    return arg.evaluate(lambda name: T if name == "S" else Sym(name))


def _layers(fn: Function) -> tuple[Layer, ...]:
    """Sizes of every attention, in program order."""
    found = []
    for node in fn.calls(G.ort_gqa.default, G.attend.default):
        given = arguments(node)
        if node.target is G.ort_gqa.default:
            width = _int(type_of(given["past_key"]).dims[3])
            found.append(Layer(given["heads"], given["groups"], width, width))
            continue
        query, keys, values = (type_of(given[name]) for name in "qkv")
        sizes = (query.dims[1], keys.dims[1], keys.dims[3], values.dims[3])
        found.append(Layer(*(_int(size) for size in sizes)))
    return tuple(found)


def _int(dim: Dim) -> int:
    return int(str(dim))


@dataclass
class _Counter:
    """Computes from `attention_mask` what graftwork's runtime hands over as inputs, but `kept`."""

    fn: Function
    concatenates: bool
    kept: tuple[str, ...] = ()
    masks: dict[Any, torch.fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        """Replace the inputs that follow from the mask, concatenate where asked, and put the real
        tokens of a step first where not."""
        rows: Dim = C + T if self.concatenates else P
        self.mask = self.fn.add_input(MASK, TensorType(torch.int64, (B, rows)))
        self.rows = rows
        first = self.fn.calls()[0]
        with self.fn.graph.inserting_before(first):
            made = self._counts()
            self.anchor = self.fn.call(A.full.default, [], 0)  # masks go before it, and it goes
        if self.concatenates:
            for node in self.fn.calls(G.attend.default):
                self._concatenate(node)
        for name, node in made.items():
            if self.fn.has_input(name) and name not in self.kept:
                # The order of the tokens is a use of them that stays.
                self.fn.input(name).replace_all_uses_with(node, partial(operator.is_not, node))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A call at the insertion point."""
        return self.fn.call(target, *args, **{"site": Site(MASK), **kwargs})

    def _counts(self) -> dict[str, torch.fx.Node]:
        count = self.call(A.sub.Tensor, self.call(A.cumsum.default, self.mask, 1), 1)
        before: Dim = C if self.concatenates else P - T
        own = self.call(A.slice.Tensor, count, 1, before, self.rows)
        self.count, self.own = count, own
        positions = self.call(A.clamp.default, own, 0)
        length = self.call(A.sum.dim_IntList, self.mask, [1])
        if self.concatenates:
            return {"past": self.call(A.sub.Tensor, length, T), "positions": positions}
        real = self.call(A.slice.Tensor, self.mask, 1, before, self.rows)
        past = self.call(A.sub.Tensor, length, self.call(A.sum.dim_IntList, real, [1]))
        last = self.call(A.add.Tensor, past, T - 1)
        order = self._sorted(real, descending=True)  # real tokens first, each kind as it stood
        return {
            "tokens": self.call(A.gather.default, self.fn.input("tokens"), 1, order),
            "past": past,
            "positions": self.call(A.gather.default, positions, 1, order),
            SELECT: self._sorted(order, descending=False),  # back again
            SEQLENS: self.call(A._to_copy.default, last, dtype=torch.int32),
            TOTAL: self.call(A.full.default, [], self.rows, dtype=torch.int32),
        }

    def _sorted(self, x: torch.fx.Node, descending: bool) -> torch.fx.Node:
        """Where i64[B,T] the values of each row stand, in their order; equal ones as they stood."""
        made = self.call(A.sort.stable, x, stable=True, dim=1, descending=descending)
        return self.fn.item(made, 1)

    def _concatenate(self, node: torch.fx.Node) -> None:
        """Attention over past and new rows side by side, instead of a cache of fixed capacity."""
        given = arguments(node)
        writes = [given["k"], given["v"]]
        mask, bias = given["mask"], given["bias"]
        if not _reads_step_mask(node):
            targets = [w.target for w in writes] + [mask.target]
            raise UnsupportedError(
                f"%{node.name} ({site_of(node).module}) cannot become portable attention: it reads "
                f"its cache through {', '.join(str(t) for t in targets)}"
            )
        span = tuple((n, arguments(mask)[n]) for n in SPANS if arguments(mask)[n] is not None)
        with self.fn.graph.inserting_before(node):
            sides = [self._joined(write) for write in writes]
            bias = None if bias is None else self._alibi(arguments(bias)["slopes"])
            options = {k: given[k] for k in ("scale", "softcap") if given[k] is not None}
            made = self.call(
                G.attend.default,
                *(given["q"], *sides, self._visible(span), bias, given["sinks"]),
                site=site_of(node),
                **options,
            )
        node.replace_all_uses_with(made)
        for write, side in zip(writes, sides, strict=True):
            write.replace_all_uses_with(side)

    def _joined(self, write: torch.fx.Node) -> torch.fx.Node:
        cache, new = write.args[:2]
        return self.call(A.cat.default, [cache, new], 2, site=site_of(write))

    def _step(self) -> tuple[torch.fx.Node, torch.fx.Node]:
        """Row counts i64[B] and rows i64[B,T] of the step, padding included."""
        before = self.call(A.full.default, [B], C, dtype=torch.int64)
        steps = self.call(A.arange.default, T, dtype=torch.int64)
        return before, self.call(A.add.Tensor, self.call(A.unsqueeze.default, before, 1), steps)

    def _visible(self, span: tuple[tuple[str, int], ...]) -> torch.fx.Node:
        """bool[B,1,T,C+T]: earlier rows that are no padding, and the token's own."""
        if span not in self.masks:
            with self.fn.graph.inserting_before(self.anchor):
                self.masks[span] = self._make_visible(dict(span))
        return self.masks[span]

    def _make_visible(self, span: Mapping[str, int]) -> torch.fx.Node:
        before, own = self._step()
        places: tuple[Any, ...] = (own, None, self.rows)
        if span:  # of positions, not rows: padding lies between
            places = (self.own, None, self.rows, self.count)
        causal = self.call(G.step_mask.default, before, *places, **span)
        real = self.call(A.ne.Scalar, self.mask, 0)
        for axis in (1, 1):
            real = self.call(A.unsqueeze.default, real, axis)
        column = self.call(A.arange.default, self.rows, dtype=torch.int64)
        for axis in (1, 3):
            own = self.call(A.unsqueeze.default, own, axis)
        itself = self.call(A.eq.Tensor, column, own)
        either = self.call(A.logical_or.default, real, itself)
        return self.call(A.logical_and.default, causal, either)

    def _alibi(self, slopes: torch.fx.Node) -> torch.fx.Node:
        before, _ = self._step()
        return self.call(G.alibi.default, slopes, before, self.own, self.rows, self.count)


def _rename(fn: Function, program: Program, layers: Mapping[int, int]) -> None:
    """The names that loaders know."""
    names = {name: f"{layers[state.layer]}.{state.part}" for name, state in program.states.items()}
    for name, short in names.items():
        if fn.has_input(name):
            fn.input(name).target = f"past_key_values.{short}"
    fn.input("tokens").target = TOKENS
    fn.input(TOKENS).append(fn.input(MASK))
    outputs = {names.get(n, n): node for n, node in fn.outputs.items()}
    fn.set_outputs({n if n == "logits" else f"present.{n}": v for n, v in outputs.items()})
