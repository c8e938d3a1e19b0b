"""Store weights in a few bits, with a scale for each group of values.

Before::

    %h: f32[B,T,64] = aten.embedding(@embed, %tokens)
    %y: f32[B,T,96] = aten.linear(%h, @up.weight)
    %z: f32[B*T,64] = graftwork.moe(%r, %experts, %w, @gate_up, @down, activation="silu")

After, with 4 bits for layers and 8 for the embedding, in groups of 32::

    %h: f32[B,T,64] = graftwork.quantized_embedding(%tokens, @embed.q8, @embed.q8.scale, bits=8,
      group=32)
    %y: f32[B,T,96] = graftwork.quantized_linear(%h, @up.weight.q4, @up.weight.q4.scale,
      @up.weight.q4.offset, bits=4, group=32)
    %z: f32[B*T,64] = graftwork.quantized_moe(%r, %experts, %w, @gate_up.q4, @gate_up.q4.scale,
      @gate_up.q4.offset, @down.q4, @down.q4.scale, @down.q4.offset, activation="silu", bits=4,
      group=32, down_group=32)

Activations are rounded by row, in runs of `span` values (see `ir.ops.quantized`), so a token's
result is the same whatever shares its step, and speculation on a quantized model stays lossless
with respect to that model. The bit layout is documented in `ir.ops.numerics`. Functions that only
draft follow the same options; `role` gives them their own. A recipe may have the pass several
times: each takes what is still float.

How values are chosen, and in which form (`stored`), a method says (`methods`). One that reads text
sees the target's step run over it (`engine.calibrate`), with products in float: activations that
are rounded come later. A method that does better with text is told how much the user's, or in 6
bits and fewer the bundled one, uses each channel (`channel_use`). Each expert of a mixture has
evidence of its own, of the tokens of the user's text that chose it. One that saw fewer than
`expert_tokens` for each input channel of a product is done without there (rounded to nearest by a
method that must see text), and a remark tells which those are. Experts of mixtures are rounded to
nearest if the method stores weights in a form of its own, and so are the embedding and the head
whatever the method is.

Weights that the source holds in few bits are taken, too. They stay as they are where that is as
many bits as the pass would give them, in groups as fine or finer, and activations are rounded as it
says; others are quantized anew, from the floats that theirs stand for. Remarks tell how many.

Refuses a program without weights to take, a pattern that names no weight, or one stack of a
mixture's experts without the other, rows that the group does not divide, and, with a method that
reads text, weights that the step does not multiply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
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
    Weight,
    WeightStore,
    arguments,
)
from ...ir.ops.numerics import WIDTHS, Numeric
from ...ir.ops.quantized import rounding
from ...ir.rewrite.cleanup import sweep
from ...ir.rewrite.mixtures import Stack, store_experts
from ...ir.rewrite.subgraph import fresh_name
from ..engine.base import Evidence, Outcome, TextSample, register
from ..engine.blocks import STACKS
from ..engine.calibrate import calibrate, code_of
from ..engine.functions import EVERY, edit_with_weights
from ..engine.reopening import Reopened, float_name, reopened, stored_names
from .channel_use import channel_use
from .computed import computed
from .methods.base import Method
from .methods.rtn import RoundToNearest
from .products import LayerProducts, float_weight, source_weights, vocabulary
from .rounding import SCALES, Bits, Rounding
from .solver import WeightSolver, scaled_name, unseen_experts
from .stored import Form

A, G = torch.ops.aten, torch.ops.graftwork


@register
class QuantizeWeights(Rounding):
    """bits: of a value. group: values of a row that share a scale; 0: all of it, as where 8 bits
    have rows that the group does not divide. symmetric: zero is stored exactly, and groups have no
    offset. method: how values are chosen, by name; rtn rounds to nearest. tuning: the method's own
    options. windows, length: windows of text (0: as many as the method asks for), and tokens of
    each (at most the model's context), for a method that reads some. scales: what scales and
    offsets are stored as. embedding: whether the table that tokens are looked up in and the head
    that gives logits are quantized, tied or not; or in how many bits, 8 without offsets.
    select, exclude: of these, only, or not, the weights with these names (shell patterns). rounded:
    activations are rounded to int8 by row; if not, products are float. role: only weights of
    functions whose results count (target), or are verified (draft). span: so many activations share
    a scale; 0: all of a row, as where a row cannot be divided so. expert_tokens: how many tokens
    for each input channel an expert must have seen for a method that reads text.
    """

    bits: Bits = 4
    symmetric: bool = False
    windows: Annotated[int, Field(ge=0)] = 0
    select: tuple[str, ...] = ()
    role: Literal["any", "target", "draft"] = "any"
    expert_tokens: Annotated[float, Field(ge=0)] = 2.0

    repeatable: ClassVar[bool] = True

    @property
    def sample(self) -> TextSample:
        return TextSample(self.windows or self.chooser.windows, self.length)

    @property
    def text(self) -> TextSample | None:
        return self.sample if self.chooser.reads_text else None

    @property
    def helpful(self) -> TextSample | None:
        return self.sample if self.chooser.text_helps else None

    @property
    def bundled(self) -> bool:
        return self.bits < 8 and not self.chooser.reads_text

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """The source's weights of other bits, or in coarser groups, as floats."""
        return reopened(
            *(program, held, source_weights(self, program)),
            what="quantized anew",
            roles=self._roles,
            rounded=self.rounded,
            span=self.span,
        )

    def run(self, program: Program) -> Outcome:
        """Quantize every float weight that is chosen, wherever it is multiplied or looked up."""
        return self._edited(program, {})

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        """The same, by a method that sees what the weights are multiplied with."""
        _check_patterns((*self.select, *self.exclude), program)
        method, layers = self.chooser, self.layers(program)
        every = self._mixtures(program.step, program.weights)
        mixtures = {node: stacks for node, stacks in every.items() if self._sees(node, stacks)}
        if method.text_helps and (evidence.bundled or not mixtures):
            return self._weighed(program, evidence, layers)
        stacks = [weight for found in mixtures.values() for weight in found]
        names = Counter(weight.name for weight in (*(weight for _, weight in layers), *stacks))
        twice = [name for name, count in names.items() if count > 1]
        if twice and method.reads_text:
            raise PassError(
                f"quantize_weights: {twice[0]} is multiplied in several places, which see other "
                f"values: {self.method} takes weights that are multiplied once "
                f"(exclude: [{twice[0]!r}])"
            )
        layers = [(node, weight) for node, weight in layers if weight.name not in twice]
        forms = {w.name: self.form_of(w) for w in (*(weight for _, weight in layers), *stacks)}
        if not forms or Role.TARGET not in self._roles:
            if not method.reads_text:
                return self.run(program)
            return Outcome(program, 0, f"{program.step.name} has no layer that {self.method} takes")
        fixed, least = _read_by_others(program), self.expert_tokens
        solver = WeightSolver(method, forms, fixed, least)
        code = code_of(type(method))
        mark = f"{self.method} {code} {method!r} {forms} {sorted(fixed)} {least if stacks else ''}"
        products = [*(node for node, _ in layers), *mixtures]
        found = calibrate(program, products, evidence, self.sample, solver, mark)
        named = {name: w.renamed(fresh_name(program.weights, name)) for name, w in found.items()}
        outcome = self._edited(program, named)
        told = unseen_experts(mixtures.values(), found, least, method)
        return replace(outcome, remarks=(*outcome.remarks, *told))

    def _weighed(
        self, program: Program, evidence: Evidence, layers: Sequence[tuple[torch.fx.Node, Weight]]
    ) -> Outcome:
        """The same as `run`, with channels of layers weighed by how much the text uses them."""
        if not layers or Role.TARGET not in self._roles:
            return self.run(program)
        windows = evidence.sampled(self.sample, program)
        said = partial(evidence.progress, "how much the text uses each channel")
        outcome = self._edited(program, {}, channel_use(program, layers, windows, said))
        told = ("no data was given: channels count by how much a bundled text uses them",)
        return replace(outcome, remarks=outcome.remarks + told * evidence.bundled)

    def layers(self, program: Program) -> list[tuple[torch.fx.Node, Weight]]:
        """The products of the target's step that are chosen, without tables and the head."""
        known = vocabulary(program)
        found = self._chosen(program.step, program.weights, known)
        return [(node, weight) for node, weight in found if weight.name not in known]

    def _sees(self, node: torch.fx.Node, stacks: Sequence[Weight]) -> bool:
        """Whether the method chooses the values of a mixture's experts by what they read: they
        have the form that experts can have. Errors: as `numeric_of`."""
        bias = arguments(node)["gate_up_bias"]
        return self._takes(stacks) and (bias is None or bias.op == "get_attr")

    def _takes(self, stacks: Sequence[Weight]) -> bool:
        """Whether experts have the form in which the method stores these."""
        method = self.chooser
        for weight in stacks:
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

    def _edited(
        self, program: Program, learned: Mapping[str, Weight], used: Mapping[str, Weight] = {}
    ) -> Outcome:
        """learned: the parts of weights that a method has chosen. used: what channels of weights
        count, f32[K] each."""
        _check_patterns((*self.select, *self.exclude), program)
        tables, nearest = vocabulary(program), list[torch.fx.Node]()

        def edit(fn: Function, weights: WeightStore) -> tuple[int | str, WeightStore]:
            found, mixtures = self._chosen(fn, weights, tables), self._mixtures(fn, weights)
            if not found and not mixtures:
                return "float weights are multiplied or looked up, none is chosen", weights
            product = LayerProducts(fn, self.rounded, self.span)
            for node, weight in found:
                known = weight.name in tables
                form = Form((self.numeric_of(weight, True),)) if known else self.form_of(weight)
                method = RoundToNearest() if known else self.chooser
                use = None if known else used.get(weight.name)
                parts = self._parts(fn, weight, form, method, weights, learned, use)
                weights = weights.adding(*parts.values())
                product.replace(node, weight.name, form, parts)
            for node, stacks in mixtures.items():
                reads = self.chooser.reads_text
                taken = self._sees(node, stacks) if reads else self._takes(stacks)
                nearest.extend([] if taken else [node])
                method = self.chooser if taken else RoundToNearest()
                weights = self._store_experts(fn, node, stacks, method, weights, learned)
            weights = _with_factors(fn, weights, learned)
            sweep(fn)
            return len(found) + len(mixtures), weights

        outcome = edit_with_weights(program, edit, self._roles)
        if not nearest or self.chooser.quick:
            return outcome
        experts = f"the experts of {len(nearest)} mixtures"
        said = f"{experts} are rounded to nearest, not by {self.method}"
        return replace(outcome, remarks=(*outcome.remarks, said))

    def _chosen(
        self, fn: Function, weights: WeightStore, tables: frozenset[str]
    ) -> list[tuple[torch.fx.Node, Weight]]:
        """The layers, and the look-ups of `tables`, whose weights are chosen."""
        found = []
        for node in fn.calls(A.linear.default, A.embedding.default):
            weight = float_weight(node, weights)
            if weight is None or not self.names(weight):
                continue
            known = weight.name in tables
            positions = node.target is A.embedding.default and not known
            if not positions and (self.embedding is not False or not known):
                found.append((node, weight))
        return found

    def names(self, weight: Weight) -> bool:
        """Whether the patterns choose a weight."""
        named = not self.select or _matches(weight.name, self.select)
        return named and not _matches(weight.name, self.exclude)

    def _mixtures(
        self, fn: Function, weights: WeightStore
    ) -> dict[torch.fx.Node, tuple[Weight, ...]]:
        """The mixtures whose float experts are chosen, and their weights: gate and up of all
        experts, and down. Errors: `PassError` where one of these is chosen without the other."""
        found = {}
        for node in fn.calls(G.moe.default):
            given = [arguments(node)[name] for name in STACKS]
            if any(stack.op != "get_attr" for stack in given):
                continue
            stacks = tuple(weights[str(stack.target)] for stack in given)
            taken = [self.names(stack) for stack in stacks]
            if taken[0] != taken[1]:
                raise PassError(
                    f"quantize_weights: {stacks[0].name} and {stacks[1].name} are the experts of "
                    f"one mixture, and have one number of bits: choose both, or exclude both"
                )
            if taken[0] and stacks[0].type.dtype.is_floating_point:
                found[node] = stacks
        return found

    def _store_experts(
        self,
        fn: Function,
        node: torch.fx.Node,
        experts: Sequence[Weight],
        method: Method,
        weights: WeightStore,
        learned: Mapping[str, Weight],
    ) -> WeightStore:
        """Replace a mixture by one of stored experts."""
        stacks = []
        for weight in experts:
            numeric = self.numeric_of(weight, False)
            parts = self._parts(fn, weight, Form((numeric,)), method, weights, learned)
            weights = weights.adding(*parts.values())
            packed, scale, *offset = parts.values()
            stacks.append(Stack(packed, scale, offset[0] if offset else None, numeric.group))
        sizes = [(weight.type.shape[2], s.group) for weight, s in zip(experts, stacks, strict=True)]
        how = rounding(self.rounded, self.span, *sizes)
        store_experts(fn, node, *stacks, bits=self.bits, how=how)
        return weights

    def _parts(
        self,
        fn: Function,
        weight: Weight,
        form: Form,
        method: Method,
        weights: WeightStore,
        learned: Mapping[str, Weight],
        used: Weight | None = None,
    ) -> dict[str, Weight]:
        """The parts of a weight that a method chooses, by name. used: what channels count. Errors:
        `PassError` where it has to see text, and has not seen what the weight is multiplied with.
        """
        names = form.names(weight.name)
        if names[0] not in learned and not method.reads_text:
            return computed(weight, form, method, weights, used)
        if names[0] not in learned:
            raise PassError(
                f"quantize_weights: {self.method} sees what the target's step multiplies, and "
                f"{weight.name} of {fn.name} ({fn.role.value}) is not among it: give this pass "
                f"role: target, and quantize drafts with another, method: rtn and role: draft"
            )
        return {name: learned[name] for name in names}

    def numeric_of(self, weight: Weight, known: bool) -> Numeric:
        """How a weight is stored. Errors: `PassError` for a group that does not divide its rows."""
        columns = int(str(weight.type.dims[-1]))
        bits = self.embedding if known and self.embedding is not True else self.bits
        # A table of 8 bits has no offsets: they would cost time, and bring nothing.
        plain = self.symmetric or (bits == 8 and self.bits != 8)
        kind = "symmetric" if plain else "affine"
        whole = not self.group or (bits == 8 and columns % self.group != 0)
        group = columns if whole else self.group
        numeric = Numeric(bits, group, kind, SCALES[self.scales])
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


def _check_patterns(patterns: Iterable[str], program: Program) -> None:
    """Errors: `PassError` for a pattern that names no weight."""
    stored = {float_name(name, bits) for name in stored_names(program) for bits in WIDTHS}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in {*program.weights, *stored}):
            raise PassError(
                f"quantize_weights: the pattern {pattern!r} names no weight of {program.name}; its "
                f"weights look like {next(iter(program.weights), '')!r}"
            )


def _with_factors(fn: Function, weights: WeightStore, learned: Mapping[str, Weight]) -> WeightStore:
    """The store with the weights that took over factors of quantized ones, which read them now."""
    for node in fn.graph.find_nodes(op="get_attr"):
        scaled = learned.get(scaled_name(str(node.target)))
        if scaled is not None:
            weights = weights.adding(scaled)
            with fn.graph.inserting_before(node):
                fn.replace(node, fn.weight(scaled))
    return weights


def _read_by_others(program: Program) -> frozenset[str]:
    """Names of weights and states that functions read which are none of the target's."""
    others = [fn for fn in program.functions.values() if fn.role is not Role.TARGET]
    inputs = {str(node.target) for fn in others for node in fn.inputs}
    return frozenset(inputs.union(*(fn.weights for fn in others)))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
