"""Growing a function onto a program: taps of the target, copies of its parts, new weights.

A draft head is a function of its own that reads what the step returns. `Graft` builds one: inputs,
the target's embedding, final norm and language-model head (its nodes are copied, its weights are
shared), and new weights whose first values follow from their names, so that a program is the same
each time it is made.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx

from ...ir import (
    Function,
    PassError,
    Program,
    Role,
    TensorType,
    Weight,
    arguments,
    cone,
    derivation,
    derive,
    site_of,
    type_of,
)
from ...ir.execution.analysis import blocks_of, part_of
from ...ir.plan import DraftRecord
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.stored import values_of
from ..engine.functions import token_look_ups
from ..engine.plan_edits import with_draft
from ..stepping.pick_logits import pick_after
from .draft_vocabulary import DraftVocabulary
from .trained import Published, TrainedWeights, as_published

A, G = torch.ops.aten, torch.ops.graftwork

FROZEN = ".some"
"""Ends the names of the target's own weights of which a drafter has some rows."""


class Graft:
    """A new function `name` of a program, and the step that feeds it.

    weights: a file of trained weights (see `TrainedWeights`, and for `published`); without one they
    are untrained. onto: a copy of a function that is there, which then grows instead. Every value
    has the shape [B,T,...]: T draft nodes of each sequence, or T tokens in training. Errors:
    `PassError` naming what the program lacks.
    """

    def __init__(
        self,
        program: Program,
        owner: str,
        name: str,
        weights: str = "",
        published: Published = as_published,
        onto: Function | None = None,
    ) -> None:
        self.program, self.owner = program, owner
        self.trained = TrainedWeights(weights, owner, program, published)
        self.step = program.step.copy()
        sweep(self.step)  # markers that are not read any more cannot be tapped
        self.fn = Function(name, role=Role.DRAFT) if onto is None else onto
        self.weights = program.weights
        self.markers, self.blocks = self.step.calls(G.hidden.default), blocks_of(self.step)
        if not self.markers:
            raise PassError(f"{owner}: step has no graftwork.hidden marker to tap")
        if name in program.functions:
            raise PassError(f"{owner}: the program has a function {name!r} already")
        last = self.markers[-1]
        self.dtype, self.hidden = type_of(last).dtype, int(str(type_of(last).dims[-1]))
        self.vocab = program.info.vocab_size
        self.known: DraftVocabulary | None = None
        self.product = self._head_product(last)

    # -- the target's side

    def tap(self, layer: int | None = None) -> str:
        """Let the step return the residual stream after a layer; None: after the last."""
        if layer is not None and layer not in self.blocks:
            raise PassError(
                f"{self.owner}: no layer {layer}; the program has {sorted(self.blocks)}"
            )
        name = "hidden" if layer is None else f"hidden.{layer}"
        node = self.markers[-1] if layer is None else self.blocks[layer]
        outputs = self.step.outputs
        self.step.set_outputs({**outputs, name: outputs.get(name, node)})
        return name

    def tap_normed(self) -> str:
        """Let the step return what its head reads, of every token: the last state, normed."""
        name = "hidden.normed"
        outputs = self.step.outputs
        if name not in outputs:
            # A copy: passes that choose the tokens whose logits are wanted leave it alone.
            with self.step.graph.inserting_before(self.step.output_node):
                last = self.markers[-1]
                normed = _copied(self.step, {last: last}, self.product.args[0], self.owner)
            self.step.set_outputs({**outputs, name: normed})
        return name

    def tap_embedded(self) -> str:
        """Let the step return its tokens' embeddings and what its head reads side by side,
        [B,T,2*H]. Errors: `PassError` for a step that looks no tokens up."""
        name = "hidden.embedded"
        if name in self.step.outputs:
            return name
        looked_up, before = token_look_ups(self.step), self.step.outputs
        if not looked_up:
            raise PassError(f"{self.owner}: step does not look its tokens up in an embedding table")
        normed = self.tap_normed()
        parts = [_completed(looked_up[0]), self.step.outputs[normed]]
        with self.step.graph.inserting_before(self.step.output_node):
            joined = self.step.call(A.cat.default, parts, -1)
        self.step.set_outputs({**before, name: joined})
        return name

    def tap_inputs(self, layers: Sequence[int]) -> str:
        """Let the step return the inputs of some layers side by side, [B,T,len(layers)*H]; the
        number of layers stands for the last one's output."""
        taps = [self.tap(layer - 1) for layer in layers]
        name = ".".join(["hidden", *(str(layer) for layer in layers), "joined"])
        outputs = self.step.outputs
        if name not in outputs:
            with self.step.graph.inserting_before(self.step.output_node):
                joined = self.step.call(A.cat.default, [outputs[tap] for tap in taps], -1)
            self.step.set_outputs({**outputs, name: joined})
        before = self.program.step.outputs
        kept = {n: v for n, v in self.step.outputs.items() if n not in taps or n in before}
        self.step.set_outputs(kept)
        return name

    def check_layers(self, layers: Sequence[int], have: Sequence[int], what: str) -> None:
        """That these are existing layers, each once. Errors: `PassError` saying `what` they are."""
        if not set(layers) <= set(have) or len(set(layers)) < len(layers):
            raise PassError(
                f"{self.owner}: layers={layers}: expected {what}, each once: some of "
                f"{', '.join(map(str, have))}"
            )

    def embed(self, tokens: torch.fx.Node) -> torch.fx.Node:
        """The target's embedding of tokens i64[B,T]: [B,T,H], without positions. Errors:
        `PassError` for a file of weights that were trained with another table."""
        looked_up = token_look_ups(self.step)
        if not looked_up:
            raise PassError(f"{self.owner}: step does not look its tokens up in an embedding table")
        table = looked_up[0].args[0]
        # A table of few bits is near the one that heads were trained with, not equal to it.
        if looked_up[0].target is A.embedding.default and isinstance(table, torch.fx.Node):
            self.trained.check_embedding(self.program.weights[str(table.target)])
        return self.copy({self.step.input("tokens"): tokens}, _completed(looked_up[0]))

    def norm(self, x: torch.fx.Node) -> torch.fx.Node:
        """The target's final norm, or whatever lies between its last layer and its head."""
        return self.copy({self.markers[-1]: x}, self.product.args[0])

    @property
    def words(self) -> int:
        """The number of tokens that the drafter knows."""
        return self.vocab if self.known is None else len(self.known.ids)

    def head(self, x: torch.fx.Node, own: str = "") -> torch.fx.Node:
        """The target's logits of normed states, [B,T,V], or [B,T,D] where the drafter knows D
        tokens; own: with a weight of that name, which starts as the target's, on the first H
        channels of x where x has more."""
        given: dict[Any, torch.fx.Node] = {self.product.args[0]: x}
        if own or self.known is not None:
            given = {self.product: self._own_product(x, own)}
        logits = self.copy(given, self.step.outputs["logits"])
        self.fn.retype()  # copies have the types that they had in the step
        return logits

    def _own_product(self, x: torch.fx.Node, own: str) -> torch.fx.Node:
        """The head's product with a float weight of its own, whatever the head's is; see `head`."""
        product, rows = arguments(self.product), None if self.known is None else self.known.rows
        if self.product.target is A.linear.default:
            source = self.program.weights[str(product["weight"].target)]
        else:
            source = values_of(self.product, self.program.weights).cast(self.dtype)
        wide = int(str(type_of(x).dims[-1]))
        if own:
            parts = [self.weight_of(_widened(_rows(own, source, rows), wide))]
        else:
            parts = [self.constant(_rows(f"{source.name}{FROZEN}", source, rows))]
        if product["bias"] is not None:
            bias = self.program.weights[str(product["bias"].target)]
            some = bias if rows is None else _rows(f"{bias.name}{FROZEN}", bias, rows)
            parts.append(self.constant(some))
        site, name = site_of(self.product), self.product.name
        return self.fn.call(A.linear.default, x, *parts, site=site, name=name)

    def copy(self, given: Mapping[Any, torch.fx.Node], wanted: Any) -> torch.fx.Node:
        """The step's node `wanted` computed here, with values here for some of its ancestors."""
        return _copied(self.fn, given, wanted, self.owner)

    def _head_product(self, last: torch.fx.Node) -> torch.fx.Node:
        """The product that makes logits: the last linear layer after the last marker."""
        logits = self.step.outputs.get("logits")
        found = [
            node
            for node in self.step.calls(A.linear.default, G.quantized_linear.default)
            if logits is not None
            and node in cone([logits])
            and type_of(node).dims[-1] == self.vocab // part_of(self.program)[1]
        ]
        if not found or last not in cone([found[-1]]):
            raise PassError(f"{self.owner}: step has no linear layer from hidden states to logits")
        return found[-1]

    # -- the new function's side

    def input(self, name: str, *dims: int, dtype: torch.dtype | None = None) -> torch.fx.Node:
        """An input [B,T,*dims], of the model's dtype unless said."""
        inner = "".join(f",{dim}" for dim in dims)
        text = TensorType.parse(f"f32[B,T{inner}]")
        return self.fn.add_input(name, text.with_dtype(dtype or self.dtype))

    def text_inputs(self) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node]:
        """The inputs of a function with a cache, which is fed what the step is fed: ``tokens`` and
        ``positions`` i64[B,T], and the target's ``hidden`` [B,T,H] beside each token."""
        tokens = self.input("tokens", dtype=torch.int64)
        positions = self.input("positions", dtype=torch.int64)
        return tokens, positions, self.input("hidden", self.hidden)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """A typed call."""
        return self.fn.call(target, *args, **kwargs)

    def weight_of(self, weight: Weight) -> torch.fx.Node:
        """A reference to a weight of this graft, which is added to the program."""
        if weight.name not in self.weights:
            self.weights = self.weights.adding(self.trained.of(weight))
        return self.fn.weight(weight)

    def constant(self, weight: Weight) -> torch.fx.Node:
        """A reference to a weight that is neither trained nor looked for in a file."""
        if weight.name not in self.weights:
            self.weights = self.weights.adding(weight)
        return self.fn.weight(weight)

    def parameter(self, name: str, *shape: int, init: str = "normal") -> torch.fx.Node:
        """A new weight. init: "zeros", "ones", "eye", or "normal" with variance 1 / inputs."""
        type = TensorType(self.dtype, shape)
        seed = zlib.crc32(name.encode())
        made = derive(name, type, initial, init=init, shape=shape, dtype=self.dtype, seed=seed)
        return self.weight_of(made)

    def linear(
        self, x: torch.fx.Node, name: str, outputs: int, *, bias: bool = True, init: str = "normal"
    ) -> torch.fx.Node:
        """x W^T + b with new weights ``name.weight`` [outputs, inputs] and ``name.bias``."""
        inputs = int(str(type_of(x).dims[-1]))
        weight = self.parameter(f"{name}.weight", outputs, inputs, init=init)
        extra = [self.parameter(f"{name}.bias", outputs, init="zeros")] if bias else []
        return self.call(A.linear.default, x, weight, *extra)

    def rms_norm(self, x: torch.fx.Node, name: str, eps: float = 1e-6) -> torch.fx.Node:
        """A new norm with gains ``name.weight``."""
        size = int(str(type_of(x).dims[-1]))
        weight = self.parameter(f"{name}.weight", size, init="ones")
        return self.call(G.rms_norm.default, x, weight, eps=eps)

    def res_block(self, x: torch.fx.Node, name: str) -> torch.fx.Node:
        """x + SiLU(W x + b), W = b = 0 at first (Medusa's block)."""
        size = int(str(type_of(x).dims[-1]))
        inner = self.call(A.silu.default, self.linear(x, name, size, init="zeros"))
        return self.call(A.add.Tensor, x, inner)

    def concat(self, *parts: torch.fx.Node) -> torch.fx.Node:
        """Along the last axis."""
        return self.call(A.cat.default, list(parts), -1)

    def stacked(self, parts: Sequence[torch.fx.Node]) -> torch.fx.Node:
        """[B,T,N,...] of N values [B,T,...]."""
        apart = [self.call(A.unsqueeze.default, part, 2) for part in parts]
        return self.call(A.cat.default, apart, 2)

    def fused(
        self, tokens: torch.fx.Node, hidden: torch.fx.Node, name: str, *, bias: bool = True
    ) -> torch.fx.Node:
        """fc([e; h]) [B,T,H] of the tokens' embeddings and the states beside them (EAGLE)."""
        joined = self.concat(self.embed(tokens), hidden)
        return self.linear(joined, name, self.hidden, bias=bias)

    def unmarked(self, state: torch.fx.Node) -> torch.fx.Node:
        """The same state in a function without markers: those that were copied are the step's."""
        for node in self.fn.calls(G.hidden.default):
            inner = node.all_input_nodes[0]
            node.replace_all_uses_with(inner)
            self.fn.graph.erase_node(node)
            state = inner if node is state else state
        return state

    def candidates(self, logits: torch.fx.Node, count: int) -> dict[str, torch.fx.Node]:
        """The outputs that proposers read: logits, and the best tokens and log probabilities."""
        found = candidates(self.fn, logits, min(count, int(str(type_of(logits).dims[-1]))))
        return found if self.known is None else self.known.widened(self.fn, found, self.constant)

    def picked(
        self, state: torch.fx.Node, best: Mapping[str, torch.fx.Node]
    ) -> dict[str, torch.fx.Node]:
        """The outputs of a function with a cache: ``hidden``, a state of every token, and what
        proposers read (see `candidates`) of those that its new input ``select`` chooses, because a
        head costs more than a layer. Errors: `PassError` if the head mixes tokens."""
        self.fn.set_outputs({"hidden": state, **best})
        if miss := pick_after(self.fn, state, "draft_logits"):
            raise PassError(f"{self.owner}: {miss}")
        return self.fn.outputs

    def done(self, outputs: Mapping[str, torch.fx.Node]) -> Program:
        """The program with the step's taps, the new function and the new weights."""
        self.fn.set_outputs(outputs)
        program = self.program.with_function(self.step, weights=self.weights)
        return program.with_function(self.fn)

    def drafted(self, outputs: Mapping[str, torch.fx.Node], draft: DraftRecord) -> Program:
        """`done`, with the drafter that uses the function."""
        return with_draft(self.done(outputs), draft)


def candidates(fn: Function, logits: torch.fx.Node, count: int) -> dict[str, torch.fx.Node]:
    """See `Graft.candidates`; at the insertion point of a function."""
    scores = fn.call(A._log_softmax.default, logits, -1, False)
    best = fn.call(A.topk.default, scores, count)
    values, tokens = fn.item(best, 0), fn.item(best, 1)
    return {"draft_logits": logits, "draft_tokens": tokens, "draft_scores": values}


def _copied(
    fn: Function, given: Mapping[Any, torch.fx.Node], wanted: Any, owner: str
) -> torch.fx.Node:
    """A function's node `wanted` in `fn`, the same or another one; see `Graft.copy`."""
    copies: dict[torch.fx.Node, torch.fx.Node] = dict(given)
    members = cone([wanted], copies) - copies.keys()
    for node in sorted(members):  # fx nodes compare by their place in the graph
        if node.op == "placeholder" and node.graph is not fn.graph:
            raise PassError(
                f"{owner}: the part of the step that is wanted here also needs its input "
                f"{node.target!r}"
            )
        is_input = node.op == "placeholder"
        copies[node] = node if is_input else fn.graph.node_copy(node, lambda n: copies[n])
    return copies[wanted]


def _completed(node: torch.fx.Node) -> torch.fx.Node:
    """A look-up's value in the model's dtype, of the whole table if processes share it."""
    (user, *others) = node.users
    wholes = A._to_copy.default, G.rows_part.default, G.all_reduce.default
    more = user.target in wholes and not others
    return _completed(user) if more else node


def _rows(name: str, source: Weight, rows: Weight | None) -> Weight:
    """A copy of a weight, or of some of its rows."""
    if rows is None:
        return derive(name, source.type, A.clone.default, source)
    type = TensorType(source.type.dtype, (*rows.type.dims, *source.type.dims[1:]))
    return derive(name, type, picked_rows, source, rows)


@derivation
def picked_rows(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a weight by their numbers i64[R]."""
    return weight[rows]


def _widened(head: Weight, inputs: int) -> Weight:
    """A head [V,H] that takes more inputs: those beyond H count nothing at first."""
    rows, have = (int(str(dim)) for dim in head.type.dims)
    if have == inputs:
        return head
    type = TensorType(head.type.dtype, (rows, inputs))
    return derive(head.name, type, widened, head, more=inputs - have)


@derivation
def widened(head: torch.Tensor, *, more: int) -> torch.Tensor:
    """A head [V,H] with so many columns of zeros more."""
    return torch.nn.functional.pad(head, (0, more))


@derivation
def initial(*, init: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What a weight is before it is trained, see `Graft.parameter`."""
    if init == "eye":
        return torch.eye(*shape, dtype=dtype)
    if init != "normal":
        return torch.full(shape, float(init == "ones"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype)
