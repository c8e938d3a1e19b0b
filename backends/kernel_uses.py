"""What runs the products, look-ups and experts of few bits of a function, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..ir import Function, arguments
from ..ir.execution.executable import DECOMPOSED, KernelUse

G = torch.ops.graftwork
STORED = {
    G.quantized_linear.default: "product",
    G.quantized_embedding.default: "look-up",
    G.quantized_moe.default: "experts",
    G.quantized_experts.default: "experts",
}
"""What ops do that nothing native runs."""


def uses(fn: Function, ops: Mapping[Any, str], kernel: str) -> Iterator[KernelUse]:
    """The calls of some ops, which say what they do, by their bits; a kernel runs them all."""
    found = Counter(
        (what, int(arguments(node)["bits"])) for op, what in ops.items() for node in fn.calls(op)
    )
    for (what, bits), count in found.items():
        yield KernelUse(fn.name, what, bits, kernel, count)


def decomposed(fn: Function) -> Iterator[KernelUse]:
    """Those that other ops do."""
    return uses(fn, STORED, DECOMPOSED)


def kernels_line(found: tuple[KernelUse, ...]) -> str:
    """For people: which kernel runs how many calls of which bits; "" if there are none."""
    sums: Counter[tuple[str, int]] = Counter()
    for use in found:
        sums[use.kernel, use.bits] += use.calls
    by_kernel: dict[str, list[str]] = {}
    for (kernel, bits), count in sorted(sums.items()):
        by_kernel.setdefault(kernel, []).append(f"{count} in {bits}")
    return "; ".join(f"{kernel}: {', '.join(counts)} bits" for kernel, counts in by_kernel.items())
