"""A method at work on the blocks of a program: what `quantize_weights` asks calibration to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ...ir import PassError
from ...ir.numerics import Numeric, Quantized
from ..engine.blocks import weight_of
from ..engine.calibrate import Seen
from .methods.base import Method


def part_names(weight: str, numeric: Numeric) -> tuple[str, ...]:
    """Names of the parts of a stored weight: bits, scales, offsets."""
    name = f"{weight}.q{numeric.bits}"
    suffixes = ("", ".scale", ".offset") if numeric.kind == "affine" else ("", ".scale")
    return tuple(name + suffix for suffix in suffixes)


def scaled_name(weight: str) -> str:
    """The name of a weight that took over factors of others and is not quantized itself."""
    return f"{weight}.scaled"


class WeightSolver:
    """Chooses values for the weights of these names, block by block. See `calibrate.Solver`.

    fixed: names of weights and states that other functions read as they are.
    """

    def __init__(
        self, method: Method, numerics: Mapping[str, Numeric], fixed: frozenset[str] = frozenset()
    ) -> None:
        self.method, self.numerics, self.fixed = method, numerics, fixed

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        """The parts of the block's weights. Errors: `PassError` naming the block and the value that
        the method cannot use."""
        changed = self.method.balanced(seen, self.numerics, self.fixed)
        kept = {
            scaled_name(name): tensor.to(seen.weights[name].dtype)
            for name, tensor in changed.items()
            if name not in self.numerics
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
                kept |= self._parts(
                    name, self.method.quantize(weight, self.numerics[name], prepared)
                )
                done += 1
                seen.progress(done / count)
        return kept

    def _parts(self, name: str, stored: Quantized) -> dict[str, Tensor]:
        parts = [part for part in stored if part is not None]
        return dict(zip(part_names(name, self.numerics[name]), parts, strict=True))

    def replaced(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Those with factors of others, and what the stored weights stand for, f32."""
        for name, tensor in kept.items():
            if _is_scaled(name):
                yield name.removesuffix(".scaled"), tensor
        for weight, numeric in self.numerics.items():
            names = part_names(weight, numeric)
            if names[0] in kept:
                yield weight, numeric.dequantize(Quantized(*(kept[name] for name in names)))


def _is_scaled(name: str) -> bool:
    return name == scaled_name(name.removesuffix(".scaled"))
