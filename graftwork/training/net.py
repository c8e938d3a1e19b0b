"""A program's functions as differentiable modules, and its trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from ..backends.torch.emit import emit
from ..backends.torch.rows import ROWS
from ..ir import Function, InputError, Program, Weight, WeightStore, type_of
from ..ir.ops import all_ops
from ..ir.ops.numerics import dequantize
from ..ir.ops.quantized import round_spans
from ..ir.plan import CachedDraft, DecodePlan, Record
from ..ir.plan.inputs import OPTIONAL, SEEN, whole_rows
from ..ir.plan.length import LengthRecord
from ..ir.rewrite.subgraph import tables_of
from ..passes.drafting.draft_vocabulary import OFFSETS, narrow
from ..passes.drafting.grafts import FROZEN
from ..passes.drafting.tune_target import TuneTarget, tuning_of
from ..passes.stepping.accept_trees import branched
from ..recipe import Recipe
from .objectives.base import Functions, Run, objective_of

_add_rms_norm = all_ops()["add_rms_norm"].meaning


def _add_rms_norm_of_two(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> Any:
    """`add_rms_norm` where products in 16 bits have made one of the two coarser than the other."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    return _add_rms_norm(x.to(dtype), residual.to(dtype), weight, eps=eps)


def _quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None = None,
    codebook: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    bits: int,
    group: int,
    rounded: bool = True,
    span: int = 0,
) -> torch.Tensor:
    """`quantized_linear` with sums that floats round, as gradients need no exact ones, which take a
    hundred times as long. Activations are rounded, and their gradient is as if they were not."""
    wide, size = x.float(), span or x.shape[-1]
    if rounded:
        steps, spans = round_spans(wide.detach(), size)
        near = (steps.unflatten(-1, (-1, size)) * spans[..., None]).flatten(-2)
        wide = wide + (near - wide.detach())
    values = dequantize(weight, scale, offset, codebook, bits=bits)
    known = None if bias is None else bias.float()
    return torch.nn.functional.linear(wide, values, known).to(x.dtype)


TRAINED: dict[Any, Callable[..., Any]] = {
    **ROWS,
    torch.ops.graftwork.add_rms_norm.default: _add_rms_norm_of_two,
    torch.ops.graftwork.quantized_linear.default: _quantized_linear,
}
"""How ops run in training, see `emit`."""


def trained_parts(plan: DecodePlan) -> list[Record]:
    """Records of a plan with trainable weights: drafters and policies with heads. A draft model is
    not trained together with a policy that judges its drafts."""
    parts = [record for slot in fields(plan) for record in getattr(plan, slot.name).trains]
    judged = plan.length.judges or plan.verify.judges
    return [part for part in parts if not (judged and _another_model(part))]


def _another_model(record: Record) -> bool:
    return isinstance(record, CachedDraft) and record.alone


def functions_of(program: Program, draft: Record) -> list[str]:
    """Functions of a program that a record names, the entry first."""
    values = [
        getattr(draft, f.name) for f in sorted(fields(draft), key=lambda f: f.name != "entry")
    ]
    flat = [name for value in values for name in (value if isinstance(value, tuple) else (value,))]
    names = [name for name in flat if isinstance(name, str) and name in program.functions]
    names += [name for part in draft.inside for name in functions_of(program, part)]
    return list(dict.fromkeys(names))


def trainable(program: Program, draft: Record) -> list[str]:
    """Floating weights of a record's functions that the step does not use, and those that the
    record names, which the step may use."""
    frozen = program.step.weights - draft.weights
    used = sorted(draft.weights)
    functions = [program.function(name) for name in functions_of(program, draft)]
    used += [w for fn in functions for w in sorted(fn.weights)]
    floating = [w for w in used if program.weights[w].type.dtype.is_floating_point]
    tables = {w for fn in functions for w in tables_of(fn)}
    frozen = {w for w in floating if w in frozen or w in tables or w.endswith(FROZEN)}
    return [w for w in dict.fromkeys(floating) if w not in frozen]


def chosen(program: Program, draft: Record) -> list[str]:
    """Untrained weights of a record's functions that are saved with the trained ones: the tokens
    of a draft vocabulary."""
    used = {w for name in functions_of(program, draft) for w in program.function(name).weights}
    return sorted(name for name in used if name.endswith(OFFSETS))


def check_chains(program: Program) -> None:
    """Errors: `InputError` for an unrolled chain of a saved program, whose merged weights are no
    longer derived from the trained ones."""
    for unrolled in filter(None, (leaf.unrolled for leaf in program.plan.draft.leaves)):
        known = program.function(unrolled.draft.function).weights | program.step.weights
        for name in sorted(program.function(unrolled.chain).weights - known):
            if not program.weights[name].inputs:
                raise InputError(
                    f"{program.name}: {unrolled.chain} was saved with {name}, which is not made "
                    f"from the weights that are trained; train the recipe on the model it was made "
                    f"from"
                )


def check_students(program: Program, drafts: Sequence[Record]) -> None:
    """Check what learns of a program. Errors: `UnsupportedError` for a drafter of a kind that does
    not, which lists those that do; `InputError` without weights of its own, or for an unrolled
    chain of a saved program."""
    if not drafts:
        objective_of(program.plan.draft)
        raise InputError(f"{program.name} has no inserted weights to train")
    check_chains(program)


def refuse_tuning(program: Program) -> None:
    """Errors: `InputError` for a recipe that trains the target, too: that has to be asked for."""
    if tuning_of(program) is not None:
        raise InputError(
            f"{program.name}: the recipe has the pass tune_target, whose training changes the "
            f"target's weights: ask for that (graftwork train --tune, or graftwork.train_target), "
            f"or train the heads of a recipe without it"
        )


def tunes(recipe: Recipe) -> bool:
    """Whether training a recipe changes the target's weights."""
    return any(isinstance(step.pass_, TuneTarget) for step in recipe.steps)


class Net:
    """Runs functions of a program with trained weights in float32. Drafters with a vocabulary of
    their own return logits of these tokens alone."""

    def __init__(self, program: Program, trained: list[str], device: torch.device) -> None:
        self.whole, self.program, self.device = program, program, device
        self.known: dict[str, torch.Tensor] = {}
        for function in program.functions:
            if found := narrow(program, function):
                self.program = self.program.with_function(found[0])
                self.known[function] = found[1].to(device)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, weight in program.weights.items():
            tensor = weight.load().to(device)
            if name in trained:
                wide = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
                # A copy, so that the program is not changed.
                tensor = torch.nn.Parameter(tensor.to(wide, copy=True))
            self.tensors[name] = tensor
        self.trained = trained
        self.modules: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Any] = {}
        self.branched: dict[str, Function] = {}

    def known_of(self, part: Record) -> torch.Tensor | None:
        """The tokens i64[D] that a record's functions know, or, of a policy, its drafter's; None:
        all."""
        draft = self.program.plan.draft if isinstance(part, LengthRecord) else part
        functions = (fn for one in (part, draft) for fn in functions_of(self.program, one))
        return next((self.known[fn] for fn in functions if fn in self.known), None)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained weights, in order."""
        return [self.tensors[name] for name in self.trained]  # type: ignore[misc]

    def collect(self) -> None:
        """After a backward pass: hand gradients on to the weights that others are computed from."""

    def renew(self) -> None:
        """After an optimizer step: compute weights anew that follow from trained ones."""

    def run(
        self, function: str | tuple[str, ...] | None, **inputs: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """A function's outputs without states; None: the target's step. A tuple: segments of the
        step in sequence, each with the inputs that it takes."""
        if isinstance(function, tuple):
            return self._in_turn(function, inputs)
        function = function or self.program.step.name
        return self.outputs(function, self._visible(self.program.function(function)), inputs)

    def sharing(self, states: Mapping[str, torch.Tensor]) -> Run:
        """`run`, with functions that draft finding these states of the target where they read
        them."""

        def run(function: Functions, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            names = self.program.shared_with(function) if isinstance(function, str) else ()
            return self.run(function, **inputs, **{name: states[name] for name in names})

        return run

    def _visible(self, fn: Function) -> tuple[str, ...]:
        """Outputs for objectives: all but caches of its own and token choices."""
        states = self.program.states
        none = {name for name, state in states.items() if state.part != "hidden"}
        none -= set(self.program.lent_by(fn.name)) if fn.name in self.program.functions else set()
        none |= {"draft_tokens", "draft_scores", "argmax"}
        return tuple(name for name in fn.outputs if name not in none)

    def _in_turn(
        self, functions: tuple[str, ...], inputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The last function's outputs; the others pass on the residual stream only."""
        stream: str = self.program.plan.step.state  # type: ignore[attr-defined]  # it is cut
        given = dict(inputs)
        for name in functions:
            fn = self.program.function(name)
            fn = branched(fn) if "ancestors" in given else fn
            taken = {key: value for key, value in given.items() if fn.has_input(key)}
            wanted = (stream,) if name != functions[-1] else self._visible(fn)
            given |= (made := self.outputs(fn, wanted, taken))
        return made

    def outputs(
        self, function: str | Function, wanted: tuple[str, ...], inputs: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Named outputs of a function over whole sequences, with empty caches.

        function: a name, or another function of the program's weights with a unique name.
        ``select`` is ignored if the function returns all tokens.
        """
        fn = self.program.function(function) if isinstance(function, str) else function
        if "ancestors" in inputs and not fn.has_input("ancestors"):
            fn = self.branched.setdefault(fn.name, branched(fn))  # takes chains only
        if unknown := sorted(
            name for name in inputs if not fn.has_input(name) and name != "select"
        ):
            raise InputError(f"{fn.name} must take the input {unknown[0]!r} to be trained")
        batch, width = next(iter(inputs.values())).shape[:2]
        given = dict(inputs)
        steps = torch.arange(width, device=self.device).expand(batch, width)
        for node in fn.inputs:
            name = str(node.target)
            if name in given or name in OPTIONAL:
                continue
            if name in self.program.states:
                bound = type_of(node).bind({"B": batch, "C": width})
                given[name] = torch.zeros(bound.shape, dtype=bound.dtype, device=self.device)
            elif name == "past":
                given[name] = torch.zeros(batch, dtype=torch.int64, device=self.device)
            elif name in ("positions", "select", SEEN):
                given[name] = steps
            elif name in (whole := whole_rows(batch, width)):
                given[name] = whole[name].to(self.device)
            else:
                raise InputError(f"{fn.name} needs the input {name!r} to be trained")
        names = tuple(str(n.target) for n in fn.inputs if str(n.target) in given)
        key = (fn.name, wanted, names)
        if key not in self.modules:
            absent = frozenset(str(n.target) for n in fn.inputs) - set(names)
            self.modules[key] = emit(fn, self.tensors, [], wanted, absent, TRAINED, self.device)
        return dict(zip(wanted, self.modules[key](*[given[n] for n in names]), strict=True))

    def trained_program(self, drafts: Sequence[Record]) -> Program:
        """The program with the current weights, and the drafters marked as trained."""
        weights = self.whole.weights
        for name in (name for name in self.trained if name in weights):
            dtype = weights[name].type.dtype
            tensor = self.tensors[name].detach().to("cpu", dtype, copy=True)
            weights = weights.replacing(Weight.of(name, tensor))
        plan = self.whole.plan
        marked: dict[str, Any] = {
            slot.name: _marked(getattr(plan, slot.name), drafts) for slot in fields(plan)
        }
        plan = replace(plan, **marked)
        return self.whole.replace(weights=self.inner(weights), plan=plan)

    def inner(self, weights: WeightStore) -> WeightStore:
        """The weights, with what was trained of their inputs."""
        return weights


def _marked(draft: Record, trained: Sequence[Record]) -> Record:
    if draft in trained:
        return replace(draft, trained=True)  # type: ignore[call-arg]  # trained ones have the field
    return draft.with_inside(lambda part: _marked(part, trained))
