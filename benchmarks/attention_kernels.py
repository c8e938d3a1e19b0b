"""What attention over a cache costs by its rows and their bits: the kernel alone.

    python benchmarks/attention_kernels.py --rows 1024 2048 8192 --widths 1 8 --bits 32 8 4
        [--heads 16] [--groups 4] [--dim 64] [--layers 16] [--rounds 30] [--threads 1] [--json F]

Milliseconds of the processor for all layers, each with a cache of its own as in a model, in turns,
the medians and the fastest of the rounds; and of reading the same floats once (their sum), which
no attention over them can be faster than. Where other programs share the machine, times of the
processor tell more than the clock's, and memory is still shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graftwork.backends.torch import native_attention
from graftwork.ir.ops.quantized_cache import quantize_rows

Way = Callable[[], Any]


def ways(args: argparse.Namespace, rows: int, width: int) -> dict[str, Way]:
    """What is timed, by name."""
    heads, groups, dim = args.heads, args.groups, args.dim
    query = torch.randn(1, heads, width, dim)
    mask = torch.ones(1, 1, width, rows, dtype=torch.bool)
    shape = (1, groups, rows, dim)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(args.layers)]
    scale = dim**-0.5
    found: dict[str, Way] = {
        "read once": lambda: [(keys.sum(), values.sum()) for keys, values in caches]
    }
    for bits in args.bits:
        found[f"{bits} bits"] = _way(query, mask, caches, bits, scale)
    return found


def _way(query: Any, mask: Any, caches: list[Any], bits: int, scale: float) -> Way:
    if bits == native_attention.FLOATS:
        kernel = native_attention.attend
        return lambda: [kernel(query, *own, mask, None, None, scale, 0.0) for own in caches]
    how = {"bits": bits, "turned": True}
    stored = [tuple(x for rows in own for x in quantize_rows(rows, **how)) for own in caches]
    few = native_attention.attend_quantized
    return lambda: [few(query, *own, mask, None, None, bits, True, scale, 0.0) for own in stored]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 2048, 8192])
    parser.add_argument("--widths", type=int, nargs="+", default=[1])
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = []
    for rows, width in ((rows, width) for rows in args.rows for width in args.widths):
        timed = ways(args, rows, width)
        taken: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(args.rounds + 1):
            for name, way in timed.items():
                begun = time.process_time()
                way()
                taken[name].append(1e3 * (time.process_time() - begun))
        figures = {n: [statistics.median(t[1:]), min(t[1:])] for n, t in taken.items()}
        report.append({"rows": rows, "width": width, "ms": figures})
        shown = ", ".join(f"{n} {a:.2f} ({b:.2f})" for n, (a, b) in figures.items())
        print(f"{rows} rows, {width} tokens: {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
