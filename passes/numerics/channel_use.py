"""How much a text uses each channel of what products read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.fx

from ...ir import PassError, Program, Weight
from ..engine.feed import watched
from .methods.least_squares import importance

A = torch.ops.aten


def channel_use(
    program: Program,
    products: Sequence[tuple[torch.fx.Node, Weight]],
    windows: torch.Tensor,
    progress: Callable[[float], None],
) -> dict[str, Weight]:
    """By the names of weights f[N,K], what channels count f32[K] by the step's products with them,
    all there are: see `importance`. windows: texts i64[N,T]. Errors: `PassError` for values that
    are not finite."""
    fn = program.step.copy()
    copies = dict(zip(program.step, fn, strict=True))
    squares: dict[torch.fx.Node, torch.fx.Node] = {}
    with fn.graph.inserting_before(fn.output_node):
        for node, _ in products:
            read = copies[node].args[0]
            assert isinstance(read, torch.fx.Node)
            if read not in squares:
                wide = fn.call(A._to_copy.default, read, dtype=torch.float32)
                squares[read] = fn.call(A.mul.Tensor, wide, wide)
    sums: dict[str, torch.Tensor] = {}
    values = {read.name: square for read, square in squares.items()}
    for number, found in enumerate(watched(program, fn, values, windows)):
        progress(number / len(windows))
        for name, square in found.items():
            own = square.flatten(0, -2).sum(0)
            sums[name] = sums[name] + own if name in sums else own
    used: dict[str, torch.Tensor] = {}
    for node, weight in products:
        read = copies[node].args[0]
        assert isinstance(read, torch.fx.Node)
        own = sums[read.name]
        if not bool(own.isfinite().all()):
            raise PassError(
                f"quantize_weights: what {weight.name} is multiplied with is not finite on the text"
            )
        used[weight.name] = used[weight.name] + own if weight.name in used else own
    return {
        name: Weight.of(f"{name}.importance", importance(total)) for name, total in used.items()
    }
