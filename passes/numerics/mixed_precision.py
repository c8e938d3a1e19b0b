"""Store the target's weights in the bits that each needs, so many on average.

Products that share an input share their bits, so that they can still be fused. How much a group of
products suffers from fewer bits is measured: the model reads some text with that group alone
rounded to the nearest value of so many bits, and the divergence of its predictions from those of
the float model is the harm. Of all choices whose values have at most `bits` bits on average, the
one with the least sum of harms is found exactly, as a knapsack with one choice a group. Then
`quantize_weights` rounds each group, by any of its methods.

Experts of mixtures stay as they are, and a remark says so. Measuring takes groups x choices runs of
the model over `windows` windows, from the group on: what comes before it is the same for all, and
half of a run in the mean.

Refuses a mean outside the choices, and whatever `quantize_weights` refuses of a weight.
Sources: Cai et al., "ZeroQ: A Novel Zero Shot Quantization Framework" (2020) for the divergence
that each layer causes alone; Yao et al., "HAWQ-V3" (2021) for the exact choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from glob import escape
from typing import Annotated, NamedTuple

import torch
import torch.fx
from pydantic import Field, field_validator
from torch import Tensor

from ...ir import Function, PassError, Program, Weight
from ...ir.execution.interpret import Run
from ...ir.ops.numerics import Numeric
from ..engine.base import Evidence, LearningPass, Length, Outcome, TextSample, Windows, register
from ..engine.reopening import Reopened, reopened
from ..engine.validate import reference_logits, reference_run
from .products import source_weights, vocabulary
from .quantize_weights import QuantizeWeights
from .rounding import Bits, Rounding


class Choice(NamedTuple):
    """Bits of a value, what they cost (bits of all values), and the harm (nats a token)."""

    bits: Bits
    cost: int
    harm: float


class Group(NamedTuple):
    """Weights that have the same bits, and how many values they hold. first: the product that reads
    one of them first."""

    names: tuple[str, ...]
    values: int
    first: torch.fx.Node


@register
class MixedPrecision(Rounding):
    """bits: of a value, on average over the weights chosen, scales not counted. choices: what a
    group's values may have. windows, length: windows of text to measure harm on, and tokens of each
    at most. group, method, tuning, scales, embedding, exclude, rounded: as of `quantize_weights`.
    """

    bits: Annotated[float, Field(gt=0)] = 4.0
    choices: tuple[Bits, ...] = (2, 3, 4, 6, 8)
    windows: Windows = 2
    length: Length = 128

    @field_validator("choices")
    @classmethod
    def _are_several(cls, choices: tuple[Bits, ...]) -> tuple[Bits, ...]:
        if len(set(choices)) < 2:
            raise ValueError("expected at least two numbers of bits to choose from")
        return tuple(sorted(set(choices)))

    @property
    def text(self) -> TextSample:
        """For the harm, and for a method that reads text besides."""
        samples = [self.sample, self._rounding().text, self._rounding().helpful]
        return max(filter(None, samples), key=lambda sample: sample.windows * sample.length)

    def reopen(self, program: Program, held: frozenset[str]) -> Reopened:
        """The source's weights of few bits as floats: which bits they need is measured anew."""
        chosen = self._rounding().model_copy(update={"embedding": self.embedding})
        taken = source_weights(chosen, program, anew=True)

        def wants(fn: Function, call: torch.fx.Node, floats: tuple[Weight, ...]) -> str:
            mixture = call.target is torch.ops.graftwork.quantized_moe.default
            return "" if mixture else taken(fn, call, floats)

        return reopened(program, held, wants, what="quantized anew")

    def learn(self, program: Program, evidence: Evidence) -> Outcome:
        low, high = self.choices[0], self.choices[-1]
        if not low <= self.bits <= high:
            raise PassError(
                f"mixed_precision: expected bits of {low} to {high} on average, as the choices "
                f"are, got {self.bits:g}"
            )
        groups = self._groups(program)
        if not groups:
            return Outcome(program, 0, f"{program.step.name} multiplies no float weight")
        values = sum(group.values for group in groups)
        harms = self._harms(program, groups, evidence)
        chosen = least_harm(
            [
                [
                    Choice(b, b * group.values, harm)
                    for b, harm in zip(self.choices, row, strict=True)
                ]
                for group, row in zip(groups, harms, strict=True)
            ],
            math.floor(self.bits * values),
        )
        named: dict[Bits, list[str]] = {}
        for group, choice in zip(groups, chosen, strict=True):
            named.setdefault(choice.bits, []).extend(group.names)
        steps = [self._rounding(bits, names) for bits, names in sorted(named.items())]
        if self.embedding is not False:
            steps.append(
                QuantizeWeights(embedding=self.embedding, select=_patterns(vocabulary(program)))
            )
        count = 0
        for step in steps:
            made = step.apply(program, evidence)
            program, count = made.program, count + made.matches
        mean = sum(choice.cost for choice in chosen) / values
        shares = ", ".join(f"{len(names)} in {bits}" for bits, names in sorted(named.items()))
        said = [f"{mean:.2f} bits on average; of the weights, {shares}"]
        if left := len(program.step.calls(torch.ops.graftwork.moe.default)):
            said.append(f"the experts of {left} mixtures stay floats: quantize_weights takes them")
        return Outcome(program, count, "", tuple(said))

    def _rounding(self, bits: Bits = 8, names: Sequence[str] = ()) -> QuantizeWeights:
        """The pass that rounds some weights, or all, to so many bits."""
        shared = {
            name: getattr(self, name)
            for name in Rounding.model_fields.keys() - LearningPass.model_fields.keys()
        }
        shared |= {"embedding": False, "exclude": () if names else self.exclude}
        return QuantizeWeights(bits=bits, select=_patterns(names), **shared)

    def _groups(self, program: Program) -> list[Group]:
        """Weights whose products share an input, in the order of the step."""
        found: dict[torch.fx.Node, dict[str, tuple[Weight, torch.fx.Node]]] = {}
        for node, weight in self._rounding().layers(program):
            held = found.setdefault(node.all_input_nodes[0], {})
            held.setdefault(weight.name, (weight, node))
        return [
            Group(
                tuple(held),
                sum(math.prod(weight.type.shape) for weight, _ in held.values()),
                next(iter(held.values()))[1],
            )
            for held in found.values()
        ]

    def _harms(
        self, program: Program, groups: list[Group], evidence: Evidence
    ) -> list[list[float]]:
        """Nats a token that each group costs in each number of bits, rounded alone."""
        windows = evidence.sampled(self.sample, program)
        clean = [reference_logits(program, window[None])[0].float() for window in windows]
        runs = [reference_run(program, window[None]) for window in windows]
        harms = []
        for done, group in enumerate(groups):
            evidence.progress("harm of fewer bits", done / len(groups))
            for run in runs:
                run.until(group.first)
            harms.append([self._harm(program, group, bits, runs, clean) for bits in self.choices])
        return harms

    def _harm(
        self, program: Program, group: Group, bits: Bits, runs: list[Run], clean: list[Tensor]
    ) -> float:
        """Nats a token of one group rounded to the nearest. runs: up to its first product."""
        rounding = self._rounding(bits)
        weights = [program.weights[name] for name in group.names]
        rounded = {w.name: nearest(w.load(), rounding.numeric_of(w, False)) for w in weights}
        others = (run.with_weights(rounded).finished()["logits"][0].float() for run in runs)
        return math.fsum(map(divergence, clean, others)) / len(runs)


def nearest(weight: Tensor, numeric: Numeric) -> Tensor:
    """A weight's values rounded to the nearest of a format."""
    return numeric.dequantize(numeric.quantize(weight.float())).to(weight.dtype)


def divergence(clean: Tensor, other: Tensor) -> float:
    """Mean divergence in nats of the distributions of logits f32[T,V] from those of `clean`.

    By the differences d of logits it is log E exp(d) - E d under the clean distribution, of which
    float32 keeps all that matters where the distributions are nearly the same. d is taken from its
    mean, which changes neither.
    """
    chances, apart = clean.softmax(-1), other - clean
    apart -= (chances * apart).sum(-1, keepdim=True)
    return float((chances * apart.expm1()).sum(-1).double().log1p().mean())


def least_harm(options: Sequence[Sequence[Choice]], budget: int) -> list[Choice]:
    """One choice of each row, whose costs are at most `budget` together and whose harms are least.

    Exact: a partial sum is dropped only where another one costs no more and harms no more, or where
    the cheapest choices of what is left would exceed the budget.
    """
    rest = sum(min(choice.cost for choice in row) for row in options)
    best: list[tuple[int, float, tuple[Choice, ...]]] = [(0, 0.0, ())]
    for row in options:
        rest -= min(choice.cost for choice in row)
        found = [
            (cost + choice.cost, harm + choice.harm, (*chosen, choice))
            for cost, harm, chosen in best
            for choice in row
            if cost + choice.cost + rest <= budget
        ]
        best = []
        for partial in sorted(found, key=lambda sums: sums[:2]):
            if not best or partial[1] < best[-1][1]:
                best.append(partial)
    return list(best[-1][2])


def _patterns(names: Sequence[str] | frozenset[str]) -> tuple[str, ...]:
    """Shell patterns that match these names alone."""
    return tuple(sorted(map(escape, names)))
