"""Store weights in a few bits, with a scale for each group of values.

Before::

    %h: f32[B,T,64] = aten.embedding(@embed, %tokens)
    %y: f32[B,T,96] = aten.linear(%h, @up.weight)
    %z: f32[B*T,64] = graftwork.moe(%r, %experts, %w, @gate_up, @down, activation="silu")

After, with 4 bits for layers and 8 for the embedding, in groups of 32::

    %h: f32[B,T,64] = graftwork.quantized_embedding(%tokens, @embed.q8, @embed.q8.scale,
      @embed.q8.offset, bits=8, group=32)
    %y: f32[B,T,96] = graftwork.quantized_linear(%h, @up.weight.q4, @up.weight.q4.scale,
      @up.weight.q4.offset, bits=4, group=32)
    %z: f32[B*T,64] = graftwork.quantized_moe(%r, %experts, %w, @gate_up.q4, @gate_up.q4.scale,
      @gate_up.q4.offset, @down.q4, @down.q4.scale, @down.q4.offset, activation="silu", bits=4,
      group=32, down_group=32)

Activations are rounded by row (see `ir.ops.quantized`), so a token's result is the same whatever
shares its step, and speculation on a quantized model stays lossless with respect to that model. The
bit layout is documented in `ir.ops.numerics`. Functions that only draft follow the same options;
`role` gives them their own. A recipe may have the pass several times: each takes what is still
float.

How values are chosen, and in which form (`stored`), a method says (`methods`). One that reads text
sees the target's step run over it (`engine.calibrate`), with products in float: activations that
are rounded come later. Each expert of a mixture has evidence of its own, of the tokens that chose
it. One that saw fewer than `expert_tokens` for each input channel of a product is rounded to
nearest there, and a remark tells which those are; so are the experts of mixtures if the method
stores weights in a form of its own, and the embedding and the head whatever the method is.

Weights that the source holds in few bits are taken, too. They stay as they are where that is as
many bits as the pass would give them, in groups as fine or finer, and activations are rounded as it
says; others are quantized anew, from the floats that theirs stand for. Remarks tell how many.

Refuses a program without weights to take, a pattern that names no weight, or one stack of a
mixture's experts without the other, rows that the group does not divide, and, with a method that
reads text, weights that the step does not multiply.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

import torch
import torch.fx
from pydantic import Field

from ...ir import (
    Function,
    InputError,
    PassError,
    Program,
    Role,
    TensorType,
    Weight,
    WeightStore,
    arguments,
    derivation,
    derive,
)
from ...ir.ops.numerics import WIDTHS, Numeric
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.mixtures import Stack, store_experts
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Evidence, Outcome, TextSample, register
from ..engine.blocks import STACKS
from ..engine.calibrate import calibrate
from ..engine.functions import EVERY, edit_with_weights
from ..engine.reopening import Reopened, float_name, reopened, stored_names
from ..engine.sources import code_of
from .layer_products import LayerProducts
from .methods.base import Method
from .methods.rtn import RoundToNearest
from .products import float_weight, source_weights, vocabulary
from .rounding import Bits, Rounding
from .solver import WeightSolver, scaled_name, seen_enough, tokens_name
from .stored import Form

A, G = torch.ops.aten, torch.ops.graftwork
SCALES = {"f16": torch.float16, "f32": torch.float32}


@register
class QuantizeWeights(Rounding):
    """bits: of a value. group: values of a row that share a scale; 0: all of it. symmetric: zero is
    stored exactly, and groups have no offset. method: how values are chosen, by name; rtn rounds to
    nearest. tuning: the method's own options. windows, length: windows of text, and tokens of each
    (at most the model's context), for a method that reads some. scales: what scales and offsets are
    stored as. embedding: whether the table that tokens are looked up in and the head that gives
    logits are quantized, tied or not; or in how many bits. select, exclude: of these, only, or not,
    the weights with these names (shell patterns). rounded: activations are rounded to int8 by row;
    if not, products are float. role: only weights of functions whose results count (target), or are
    verified (draft). expert_tokens: how many tokens for each input channel an expert must have seen
    for a method that reads text.
    """

    bits: Bits = 4
    symmetric: bool = False
    windows: Annotated[int, Field(ge=1)] = 64
    length: Annotated[int, Field(ge=2)] = 512
    select: tuple[str, ...] = ()
    role: Literal["any", "target", "draft"] = "any"
    expert_tokens: Annotated[float, Field(ge=0)] = 2.0

    name: ClassVar[str] = "quantize_weights"
    repeatable: ClassVar[bool] = True

    @property
    def text(self) -> TextSample | None:
        """What the method must see."""
        reads = self.chooser.reads_text
        return TextSample(self.windows, self.length) if reads else None

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """The source's weights of other bits, or in coarser groups, as floats."""
        wants = source_weights(self, program)
        what = "quantized anew"
        return reopened(program, held, wants, what=what, roles=self._roles, rounded=self.rounded)

    def run(self, program: Program) -> Outcome:
        """Quantize every float weight that is chosen, wherever it is multiplied or looked up."""
        return self._edited(program, {})

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """The same, by a method that sees what the weights are multiplied with."""
        self._check_patterns(program)
        layers, mixtures = self.layers(program), self._seen_mixtures(program)
        stacks = [weight for found in mixtures.values() for weight in found]
        weights = [*(weight for _, weight in layers), *stacks]
        forms = {weight.name: self.form_of(weight) for weight in weights}
        names = [weight.name for weight in weights]
        if twice := [name for name in names if names.count(name) > 1]:
            raise PassError(
                f"quantize_weights: {twice[0]} is multiplied in several places, which see other "
                f"values: {self.method} takes weights that are multiplied once "
                f"(exclude: [{twice[0]!r}])"
            )
        if not forms or Role.TARGET not in self._roles:
            return Outcome(program, 0, f"{program.step.name} has no layer that {self.method} takes")
        assert self.text is not None
        method = self.chooser
        fixed, least = _read_by_others(program), self.expert_tokens
        solver = WeightSolver(method, forms, fixed, least)
        code = code_of(type(method))
        mark = f"{self.method} {code} {method!r} {forms} {sorted(fixed)} {least if stacks else ''}"
        products = [*(node for node, _ in layers), *mixtures]
        found = calibrate(program, products, evidence, self.text, solver, mark)
        named = {name: w.renamed(fresh_name(program.weights, name)) for name, w in found.items()}
        outcome = self._edited(program, named)
        told = _of_unseen_experts(mixtures.values(), found, least)
        return replace(outcome, remarks=(*outcome.remarks, *told))

    def layers(self, program: Program) -> list[tuple[torch.fx.Node, Weight]]:
        """The products of the target's step that are chosen, without tables and the head."""
        known = vocabulary(program)
        found = self._chosen(program.step, program.weights, known)
        return [(node, weight) for node, weight in found if weight.name not in known]

    def _seen_mixtures(self, program: Program) -> dict[torch.fx.Node, tuple[Weight, ...]]:
        """Of the target's step: those whose experts are chosen, and that the method takes, with
        their stacks."""
        weights, fn = program.weights, program.step
        taken = [node for node in fn.calls(G.moe.default) if self._takes_experts(node, weights)]
        found = {node: _stacks_of(node, weights) for node in taken}
        return {node: stacks for node, stacks in found.items() if self._sees_experts(node, weights)}

    def _sees_experts(self, node: torch.fx.Node, weights: WeightStore) -> bool:
        """Whether the method chooses the values of a mixture's experts: it reads text, and they
        have the form that experts can have. Errors: as `numeric_of`."""
        method = self.chooser
        if not method.reads_text or arguments(node)["gate_up_bias"] not in _weights_in(node):
            return False
        for weight in _stacks_of(node, weights):
            numeric, (_, rows, columns) = self.numeric_of(weight, False), weight.type.shape
            try:
                if method.form(numeric, rows, columns) != Form((numeric,)):
                    return False
            except InputError:
                return False
        return True

    @property
    def _roles(self) -> frozenset[Role]:
        return EVERY if self.role == "any" else frozenset({Role(self.role)})

    def _edited(self, program: Program, learned: Mapping[str, Weight]) -> Outcome:
        """learned: the parts of weights that a method has chosen."""
        self._check_patterns(program)
        known = vocabulary(program)

        mixtures = 0

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            nonlocal mixtures
            taken = [n for n in fn.calls(G.moe.default) if self._takes_experts(n, weights)]
            mixtures += sum(not self._sees_experts(node, weights) for node in taken)
            return self._quantize(fn, weights, known, learned)

        outcome = edit_with_weights(program, edit, self._roles)
        if not mixtures or self.chooser.quick:
            return outcome
        said = f"the experts of {mixtures} mixtures are rounded to nearest, not by {self.method}"
        return replace(outcome, remarks=(*outcome.remarks, said))

    def _chosen(
        self, fn: Function, weights: WeightStore, tables: frozenset[str]
    ) -> list[tuple[torch.fx.Node, Weight]]:
        calls = fn.calls(A.linear.default, A.embedding.default)
        given = [(node, weight) for node in calls if (weight := float_weight(node, weights))]
        return [(n, weight) for n, weight in given if self._takes(n, weight, tables)]

    def _quantize(
        self,
        fn: Function,
        weights: WeightStore,
        tables: frozenset[str],
        learned: Mapping[str, Weight],
    ) -> tuple[int | str, WeightStore]:
        found = self._chosen(fn, weights, tables)
        mixtures = [node for node in fn.calls(G.moe.default) if self._takes_experts(node, weights)]
        if not found and not mixtures:
            return "float weights are multiplied or looked up, none is chosen", weights
        method = self.chooser
        product = LayerProducts(fn, self.rounded)
        for node, weight in found:
            known = weight.name in tables
            form = Form((self.numeric_of(weight, True),)) if known else self.form_of(weight)
            if method.reads_text and not known:
                parts = self._learned(fn, weight, form, learned)
            else:
                parts = _computed(weight, form, RoundToNearest() if known else method, weights)
            weights = weights.adding(*parts.values())
            product.replace(node, weight.name, form, parts)
        for node in mixtures:
            weights = self._store_experts(fn, node, weights, learned)
        weights = _with_factors(fn, weights, learned)
        sweep(fn)
        return len(found) + len(mixtures), weights

    def _learned(
        self, fn: Function, weight: Weight, form: Form, learned: Mapping[str, Weight]
    ) -> dict[str, Weight]:
        names = form.names(weight.name)
        if names[0] not in learned:
            raise PassError(
                f"quantize_weights: {self.method} sees what the target's step multiplies, and "
                f"{weight.name} of {fn.name} ({fn.role.value}) is not among it: give this pass "
                f"role: target, and quantize drafts with another, method: rtn and role: draft"
            )
        return {name: learned[name] for name in names}

    def _takes(self, node: torch.fx.Node, weight: Weight, tables: frozenset[str]) -> bool:
        known = weight.name in tables
        if node.target is A.embedding.default and not known:
            return False  # a table of positions
        return self.names(weight) and (self.embedding is not False or not known)

    def names(self, weight: Weight) -> bool:
        """Whether the patterns choose a weight."""
        named = not self.select or _matches(weight.name, self.select)
        return named and not _matches(weight.name, self.exclude)

    def _takes_experts(self, node: torch.fx.Node, weights: WeightStore) -> bool:
        """Whether the float experts of a mixture are chosen. Errors: `PassError` for one stack of
        them without the other."""
        stacks = [arguments(node)[name] for name in STACKS]
        if any(stack.op != "get_attr" for stack in stacks):
            return False
        names = [str(stack.target) for stack in stacks]
        named = [not self.select or _matches(name, self.select) for name in names]
        taken = [n and not _matches(w, self.exclude) for n, w in zip(named, names, strict=True)]
        if taken[0] != taken[1]:
            raise PassError(
                f"quantize_weights: {names[0]} and {names[1]} are the experts of one mixture, and "
                f"have one number of bits: choose both, or exclude both"
            )
        return taken[0] and weights[names[0]].type.dtype.is_floating_point

    def _store_experts(
        self,
        fn: Function,
        node: torch.fx.Node,
        weights: WeightStore,
        learned: Mapping[str, Weight],
    ) -> WeightStore:
        """Replace a mixture by one of stored experts."""
        sees, stacks = self._sees_experts(node, weights), []
        for weight in _stacks_of(node, weights):
            numeric = self.numeric_of(weight, False)
            form = Form((numeric,))
            if sees:
                parts = self._learned(fn, weight, form, learned)
            else:
                parts = _computed(weight, form, RoundToNearest(), weights)
            weights = weights.adding(*parts.values())
            packed, scale, *offset = parts.values()
            stacks.append(Stack(packed, scale, offset[0] if offset else None, numeric.group))
        store_experts(fn, node, *stacks, bits=self.bits, rounded=self.rounded)
        return weights

    def numeric_of(self, weight: Weight, known: bool) -> Numeric:
        """How a weight is stored. Errors: `PassError` for a group that does not divide its rows."""
        columns = int(str(weight.type.dims[-1]))
        kind = "symmetric" if self.symmetric else "affine"
        bits = self.embedding if known and self.embedding is not True else self.bits
        numeric = Numeric(bits, self.group or columns, kind, SCALES[self.scales])
        if why := numeric.refusal(columns):
            raise PassError(f"quantize_weights: {weight.name}: {why} (exclude: [{weight.name!r}])")
        return numeric

    def form_of(self, weight: Weight) -> Form:
        """How a layer's weight is stored. Errors: `PassError` for what does not fit its rows."""
        *_, rows, columns = weight.type.shape
        method = self.chooser
        try:
            form = method.form(self.numeric_of(weight, False), rows, columns)
        except InputError as error:
            raise PassError(f"quantize_weights: {weight.name}: {self.method}: {error}") from error
        if why := form.refusal(columns):
            raise PassError(f"quantize_weights: {weight.name}: {why} (exclude: [{weight.name!r}])")
        return form

    def _check_patterns(self, program: Program) -> None:
        stored = {float_name(name, bits) for name in stored_names(program) for bits in WIDTHS}
        for pattern in (*self.select, *self.exclude):
            if not any(fnmatchcase(name, pattern) for name in {*program.weights, *stored}):
                raise PassError(
                    f"quantize_weights: the pattern {pattern!r} names no weight of "
                    f"{program.name}; its weights look like {next(iter(program.weights), '')!r}"
                )


def _with_factors(fn: Function, weights: WeightStore, learned: Mapping[str, Weight]) -> WeightStore:
    """The store with the weights that took over factors of quantized ones, which read them now."""
    for node in fn.graph.find_nodes(op="get_attr"):
        scaled = learned.get(scaled_name(str(node.target)))
        if scaled is not None:
            weights = weights.adding(scaled)
            with fn.graph.inserting_before(node):
                node.replace_all_uses_with(fn.weight(scaled))
            fn.graph.erase_node(node)
    return weights


def _stacks_of(node: torch.fx.Node, weights: WeightStore) -> tuple[Weight, ...]:
    """The weights of all experts of a mixture: gate and up, and down."""
    given = arguments(node)
    return tuple(weights[str(given[name].target)] for name in STACKS)


def _weights_in(node: torch.fx.Node) -> list[torch.fx.Node | None]:
    """The operands of a call that are weights, and none."""
    return [None, *(given for given in node.all_input_nodes if given.op == "get_attr")]


def _of_unseen_experts(
    mixtures: Iterable[Sequence[Weight]], found: Mapping[str, Weight], least: float
) -> tuple[str, ...]:
    """A remark on the experts that are rounded to nearest because they saw too little of the text;
    none if all saw enough."""
    lines, few, count = [], 0, 0
    for stacks in mixtures:
        tokens = found[tokens_name(stacks[0].name)].load()
        for stack in stacks:
            enough = seen_enough(tokens, stack.type.shape[-1], least)
            left = (~enough).nonzero().flatten().tolist()
            few, count = few + len(left), count + len(tokens)
            if left:
                lines.append(f"{stack.name} {', '.join(map(str, left))}")
    if not lines:
        return ()
    return (
        f"{few} of {count} weights of experts are rounded to nearest, because fewer than {least:g} "
        f"tokens of the text for each of their input channels chose the expert (give more windows, "
        f"or other text): {'; '.join(lines)}",
    )


def _read_by_others(program: Program) -> frozenset[str]:
    """Names of weights and states that functions read which are none of the target's."""
    others = [fn for fn in program.functions.values() if fn.role is not Role.TARGET]
    inputs = {str(node.target) for fn in others for node in fn.inputs}
    return frozenset(inputs.union(*(fn.weights for fn in others)))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _computed(
    weight: Weight, form: Form, method: Method, weights: WeightStore
) -> dict[str, Weight]:
    """The parts of a weight, or a stack of some, by name as it would be alone: made by a method
    that needs no text, when they are loaded."""
    *outer, columns = weight.type.shape
    parts = {}
    types = form.types(math.prod(outer), columns)
    for place, (name, flat) in enumerate(zip(form.names(weight.name), types, strict=True)):
        by_row = flat.dtype in (torch.uint8, *SCALES.values()) and len(outer) > 1
        type = TensorType(flat.dtype, (*outer, flat.dims[-1])) if by_row else flat
        options = {"method": method, "form": form, "place": place, "shape": type.shape}
        part = derive(fresh_name(weights, name), type, quantized, weight, **options)
        parts[name] = weights.alike(part)
    return parts


@derivation
def quantized(
    tensor: torch.Tensor, *, method: Method, form: Form, place: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """The part of this number and shape of a weight, or of a stack of some, that a method makes
    without text."""
    rows = tensor.flatten(0, -2)
    if method.quick:
        return _parts(rows, method, form)[place].view(shape)
    data = rows.contiguous().view(torch.uint8).numpy().data
    mark = hashlib.blake2b(data).digest(), repr(method), form
    return _ONCE.part(mark, place, rows, method).view(shape)


def _parts(rows: torch.Tensor, method: Method, form: Form) -> tuple[torch.Tensor, ...]:
    return form.tensors(method.stored(rows.float(), form, None))


class _Once:
    """Parts of weights, which a method makes together: those of the latest few weights are kept
    until each has been asked for."""

    MOST = 4

    def __init__(self) -> None:
        self.left: dict[tuple[bytes, str, Form], dict[int, torch.Tensor]] = {}
        self.lock = threading.Lock()

    def part(
        self, mark: tuple[bytes, str, Form], place: int, rows: torch.Tensor, method: Method
    ) -> torch.Tensor:
        """A part of the weight of this mark."""
        with self.lock:
            if place not in self.left.get(mark, {}):
                self.left[mark] = dict(enumerate(_parts(rows, method, mark[2])))
            parts = self.left.pop(mark)
            found = parts.pop(place)
            if parts:
                self.left[mark] = parts  # the latest comes last
            while len(self.left) > self.MOST:
                del self.left[next(iter(self.left))]
            return found


_ONCE = _Once()
