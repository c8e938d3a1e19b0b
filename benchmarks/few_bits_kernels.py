"""What products with weights of few bits cost by the rows of a step: the kernels alone.

    python benchmarks/few_bits_kernels.py --rows 1 4 8 512 --threads 1

Prints milliseconds of a number of products in turns, the fastest of the rounds: float32 weights,
and weights of 8 and 4 bits with activations as they are and with rounded ones. There are as many
weights as do not fit in caches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from graftwork.backends import tiles
from graftwork.backends.torch import native, native_quantized
from graftwork.ir import Weight
from graftwork.ir.ops.numerics import Numeric

Products = Callable[[torch.Tensor], Any]


def stored(weight: torch.Tensor, bits: int, group: int) -> tuple[Any, ...]:
    """A weight's operands of a kernel: in tiles, with scales and offsets, and no codebook."""
    made = Numeric(bits, group, "affine", torch.float16).quantize(weight)
    named = [Weight.of(name, part) for name, part in zip("wso", made[:3], strict=True)]
    laid = tiles.tiled(*named, None, bits=bits, group=group)
    return tuple(part and part.load() for part in laid.parts)


def products(count: int, outputs: int, columns: int, group: int) -> dict[str, Products]:
    """Ways to multiply rows with `count` weights [outputs, columns]."""
    weights = [torch.randn(outputs, columns) for _ in range(count)]
    ways: dict[str, Products] = {
        "float32": lambda x: [native.linear_float32(x, weight) for weight in weights]
    }
    for bits in (8, 4):
        laid = [stored(weight, bits, group) for weight in weights]
        for name, kernel in (
            ("float", native_quantized.float_linear),
            ("rounded", native_quantized.quantized_linear),
        ):
            ways[f"{bits} bits, {name}"] = _way(kernel, laid, (bits, group, outputs))
    return ways


def _way(kernel: Callable[..., Any], laid: list[tuple[Any, ...]], sizes: Any) -> Products:
    return lambda x: [kernel(x, *operands, None, *sizes) for operands in laid]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 512])
    parser.add_argument("--size", type=int, nargs=2, default=[4096, 1024], metavar=("N", "K"))
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    ways = products(given.count, *given.size, given.group)
    for rows in given.rows:
        x = torch.randn(rows, given.size[1])
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(given.rounds):
            for name, way in ways.items():
                begin = time.perf_counter()
                way(x)
                best[name] = min(best[name], (time.perf_counter() - begin) * 1e3)
        shown = {name: round(ms, 2) for name, ms in best.items()}
        print(json.dumps({"rows": rows, **shown}), flush=True)


if __name__ == "__main__":
    main()
