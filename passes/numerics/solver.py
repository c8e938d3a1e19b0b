"""A method at work on the blocks of a program: what `quantize_weights` asks calibration to do."""

from __future__ import annotations

from collections.abc import Mapping

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


class WeightSolver:
    """Chooses values for the weights of these names, block by block. See `calibrate.Solver`."""

    def __init__(self, method: Method, numerics: Mapping[str, Numeric]) -> None:
        self.method, self.numerics = method, numerics

    def solve(self, seen: Seen) -> dict[str, Tensor]:
        """The parts of the block's weights. Errors: `PassError` naming the block and the value that
        the method cannot use."""
        kept: dict[str, Tensor] = {}
        count = sum(map(len, seen.products.values()))
        for tap, nodes in seen.products.items():
            try:
                prepared = self.method.prepared(seen.moments.pop(tap))
            except PassError as error:
                raise PassError(f"quantize_weights: {seen.name}, %{tap}: {error}") from error
            for node in nodes:
                name = weight_of(node)
                numeric = self.numerics[name]
                stored = self.method.quantize(seen.weights[name].float(), numeric, prepared)
                parts = [part for part in stored if part is not None]
                kept |= dict(zip(part_names(name, numeric), parts, strict=True))
                seen.progress(len(kept) / (count * len(parts)))
        return kept

    def replaced(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the stored weights stand for, f32."""
        found = {}
        for weight, numeric in self.numerics.items():
            names = part_names(weight, numeric)
            if names[0] in kept:
                found[weight] = numeric.dequantize(Quantized(*(kept[name] for name in names)))
        return found
