"""A method at work on the blocks of a program: what `quantize_weights` asks calibration to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir import PassError, Weight
from ..engine.blocks import weight_of
from ..engine.calibrate import Seen
from ..engine.moments import Moments
from ..engine.routed import Mixture
from .methods.base import Method
from .methods.rtn import RoundToNearest
from .stored import Form


def scaled_name(weight: str) -> str:
    """The name of a weight that took over factors of others and is not quantized itself."""
    return f"{weight}.scaled"


def tokens_name(stack: str) -> str:
    """The name of how many tokens chose each expert i64[E], kept with a mixture's first stack."""
    return f"{stack}.tokens"


def seen_enough(tokens: Tensor, columns: int, least: float) -> Tensor:
    """Which experts are quantized by what they saw, bool[E]: those that `least` tokens for each of
    a product's input channels chose, and one at least. Second derivatives of fewer tokens than
    channels have no full rank: feedback then moves errors to where this text never looks."""
    return tokens >= max(1, least * columns)


def unseen_experts(
    mixtures: Iterable[Sequence[Weight]], found: Mapping[str, Weight], least: float, method: Method
) -> tuple[str, ...]:
    """A remark on the experts whose values the method does not choose by the text because they saw
    too little of it; none if all saw enough."""
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
    how = "rounded to nearest" if method.reads_text else "chosen without the text"
    return (
        f"{few} of {count} weights of experts are {how}, because fewer than {least:g} "
        f"tokens of the text for each of their input channels chose the expert (give more windows, "
        f"or other text): {'; '.join(lines)}",
    )


@dataclass(frozen=True)
class WeightSolver:
    """Chooses values for the weights of these names, block by block. See `calibrate.Solver`.

    fixed: names of weights and states that other functions read as they are. least: tokens for each
    input channel that an expert must have seen; one that saw fewer is rounded to the nearest.
    """

    method: Method
    forms: Mapping[str, Form]
    fixed: frozenset[str] = frozenset()
    least: float = 0.0

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        """The parts of the block's weights. Errors: `PassError` naming the block and the value that
        the method cannot use."""
        numerics = {name: form.numerics[0] for name, form in self.forms.items()}
        changed = self.method.balanced(seen, numerics, self.fixed)
        kept = {
            scaled_name(name): tensor.to(seen.weights[name].dtype)
            for name, tensor in changed.items()
            if name not in self.forms
        }
        count = sum(map(len, seen.products.values()))
        total, done = count + sum(len(mixture.tokens) for mixture in seen.mixtures), 0
        for tap, nodes in seen.products.items():
            prepared = self._prepared(seen.moments.pop(tap), f"{seen.name}, %{tap}")
            for node in nodes:
                name = weight_of(node)
                weight = _own(changed.get(name, seen.weights[name]))
                form = self.forms[name]
                found = self.method.parts(weight, form, prepared)
                kept |= dict(zip(form.names(name), found, strict=True))
                done += 1
                seen.progress(done / total)
        for mixture in seen.mixtures:
            kept[tokens_name(mixture.stacks[0])] = mixture.tokens
            for _ in self._experts(mixture, kept):
                done += 1
                seen.progress(done / total)
        return kept

    def _prepared(self, moments: Moments, where: str) -> object:
        try:
            return self.method.prepared(moments)
        except PassError as error:
            raise PassError(f"quantize_weights: {where}: {error}") from error

    def _experts(self, mixture: Mixture, kept: dict[str, Tensor]) -> Iterator[int]:
        """Chooses the values of one expert after the other, each by what it saw, and puts the parts
        of its weights into stacks [E,...] of `kept`."""

        def put(stack: str, expert: int, method: Method, weight: Tensor, prepared: object) -> None:
            form = self.forms[stack]
            found = method.parts(weight, form, prepared)
            for name, part in zip(form.names(stack), found, strict=True):
                if name not in kept:
                    kept[name] = part.new_empty(len(mixture.tokens), *part.shape)
                kept[name][expert] = part

        sizes = [mixture.weights[name].shape[-1] for name in mixture.stacks]
        enough = [seen_enough(mixture.tokens, size, self.least).tolist() for size in sizes]
        nearest = RoundToNearest() if self.method.reads_text else self.method
        known = [expert for expert, some in enumerate(zip(*enough, strict=True)) if any(some)]
        for expert in set(range(len(mixture.tokens))).difference(known):
            for name in mixture.stacks:
                put(name, expert, nearest, _own(mixture.weights[name][expert]), None)
            yield expert
        numerics = [self.forms[name].numerics[0] for name in mixture.stacks]
        for expert, moments in mixture.moments(known):
            gate_up, down = (_own(mixture.weights[name][expert]) for name in mixture.stacks)
            if enough[1][expert] and mixture.is_linear_in_up:
                given = gate_up, down, moments[1], numerics[1]
                gate_up, down = self.method.balanced_expert(*given)
            where = f"{mixture.block}, %{mixture.node.name}, expert {expert}"
            each = zip(mixture.stacks, (gate_up, down), moments, enough, strict=True)
            for name, weight, seen, some in each:
                method = self.method if some[expert] else nearest
                prepared = self._prepared(seen, where) if some[expert] else None
                put(name, expert, method, weight, prepared)
            yield expert

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Those with factors of others, and what the stored weights stand for, f32."""
        for name, tensor in kept.items():
            if name.endswith(".scaled"):
                yield name.removesuffix(".scaled"), tensor
        for weight, form in self.forms.items():
            if form.names(weight)[0] in kept:
                yield weight, form.values(form.of(weight, kept))


def _own(weight: Tensor) -> Tensor:
    """A weight as a method may write into it: the model's own must stay."""
    return weight.to(torch.float32, copy=True)
