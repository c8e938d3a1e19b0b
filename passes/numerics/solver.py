"""A method at work on the blocks of a program: what `quantize_weights` asks calibration to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ...ir import PassError
from ..engine.blocks import weight_of
from ..engine.calibrate import Seen
from .methods.base import Method
from .stored import Form


def scaled_name(weight: str) -> str:
    """The name of a weight that took over factors of others and is not quantized itself."""
    return f"{weight}.scaled"


class WeightSolver:
    """Chooses values for the weights of these names, block by block. See `calibrate.Solver`.

    fixed: names of weights and states that other functions read as they are.
    """

    def __init__(
        self, method: Method, forms: Mapping[str, Form], fixed: frozenset[str] = frozenset()
    ) -> None:
        self.method, self.forms, self.fixed = method, forms, fixed

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
        count, done = sum(map(len, seen.products.values())), 0
        for tap, nodes in seen.products.items():
            try:
                prepared = self.method.prepared(seen.moments.pop(tap))
            except PassError as error:
                raise PassError(f"quantize_weights: {seen.name}, %{tap}: {error}") from error
            for node in nodes:
                name = weight_of(node)
                weight = changed.get(name, seen.weights[name]).float()
                form = self.forms[name]
                found = form.tensors(self.method.stored(weight, form, prepared))
                kept |= dict(zip(form.names(name), found, strict=True))
                done += 1
                seen.progress(done / count)
        return kept

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Those with factors of others, and what the stored weights stand for, f32."""
        for name, tensor in kept.items():
            if _is_scaled(name):
                yield name.removesuffix(".scaled"), tensor
        for weight, form in self.forms.items():
            if form.names(weight)[0] in kept:
                yield weight, form.values(form.of(weight, kept))


def _is_scaled(name: str) -> bool:
    return name == scaled_name(name.removesuffix(".scaled"))
