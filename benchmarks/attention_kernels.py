"""What attention over a cache costs by its rows and their bits: the kernel alone.

    python benchmarks/attention_kernels.py --rows 1024 2048 8192 --widths 1 8 --bits 32 8 4
        [--heads 16] [--groups 4] [--dim 64] [--layers 16] [--rounds 30] [--threads 1] [--json F]
        [--runtime] [--recipes kivi gear kvquant rotatekv]

Milliseconds of the processor for all layers, each with a cache of its own as in a model, in turns,
the medians and the fastest of the rounds; and of reading the same floats once (their sum), which
no attention over them can be faster than. With --runtime also ONNX Runtime's GroupQueryAttention on
its own caches of as many bits, with one step a channel (32 bits: floats); with --recipes also rows
as these store them, but for the latest 128, which are floats. Where other programs share the
machine, times of the processor tell more than the clock's, and memory is still shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import helper

from graftwork.backends.torch import native
from graftwork.ir.ops import all_ops
from graftwork.ir.ops.grouped_cache import quantize_groups
from graftwork.ir.ops.quantized_cache import quantize_rows
from graftwork.ir.ops.row_forms import low_rank

Way = Callable[[], Any]
RESIDUAL = 128
"""Rows of recipes that are floats."""

RECIPES: dict[str, dict[str, Any]] = {
    "kivi": {"bits": 4, "group": 32},
    "gear": {"bits": 2, "group": 64, "outliers": 1, "rank": 2},
    "kvquant": {"bits": 3, "group": 64, "outliers": 1, "rotated": True},
    "rotatekv": {"bits": 3, "group": 32, "turned": True, "rotated": True, "keys": False},
}
"""How recipes store rows. keys: whether numbers of a key's channel share steps."""

FLOATS = 32
"""Bits of rows that are stored as they are."""


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
    for recipe in args.recipes:
        found[recipe] = _grouped_way(query, mask, caches, scale, **RECIPES[recipe])
    for bits in args.bits if args.runtime else ():
        found[f"ONNX Runtime, {bits} bits"] = _runtime(args, rows, width, bits)
    return found


def _way(query: Any, mask: Any, caches: list[Any], bits: int, scale: float) -> Way:
    if bits == FLOATS:
        kernel = native.OPS["attend"]
        return lambda: [kernel(query, *own, mask, None, None, scale, 0.0) for own in caches]
    how = {"bits": bits, "turned": True}
    stored = [tuple(x for rows in own for x in quantize_rows(rows, **how)) for own in caches]
    few = native.OPS["attend_quantized"]
    return lambda: [few(query, *own, mask, None, None, bits, True, scale, 0.0) for own in stored]


def _grouped_way(
    query: Any,
    mask: Any,
    caches: list[Any],
    scale: float,
    *,
    bits: int,
    group: int,
    outliers: int = 0,
    rank: int = 0,
    turned: bool = False,
    rotated: bool = False,
    keys: bool = True,
) -> Way:
    kernel, bound = native.OPS["attend_grouped"], all_ops()["attend_grouped"].declared.bound
    rows, dim = mask.shape[3], query.shape[3]
    angle = torch.rand(1, rows, dim // 2)
    angles = (angle.cos(), angle.sin()) if rotated else (None, None)
    past = torch.tensor([rows - mask.shape[2]])
    calls = []
    for own in caches:
        stored, factors = [], []
        for x, by_channel in zip(own, (keys, False), strict=True):
            how: dict[str, Any] = {"bits": bits, "group": group, "outliers": outliers}
            codes = quantize_groups(x, by_channel=by_channel, **how)
            stored += [*codes, x[:, :, : RESIDUAL + group + mask.shape[2]].contiguous()]
            factors += low_rank(0.1 * x, group=group, rank=rank) if rank else (None, None)
        how |= {"keys_by_channel": keys, "values_by_channel": False, "turned": turned}
        how |= {"residual": RESIDUAL, "block": group, "scale": scale}
        given = (query, *stored, past, mask, None, None, *factors, *angles)
        calls.append(bound(*given, **how))
    return lambda: [kernel(*call) for call in calls]


def _runtime(args: argparse.Namespace, rows: int, width: int, bits: int) -> Way:
    """GroupQueryAttention of random queries, keys and values over random rows."""
    import onnxruntime as ort

    heads, groups, dim = args.heads, args.groups, args.dim
    few = bits != FLOATS
    stored = np.uint8 if bits == 4 else np.int8 if few else np.float32
    random = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    def cache() -> np.ndarray:
        if not few:
            return floats(1, groups, rows, dim)
        shape = (1, groups, rows, dim * bits // 8)
        return random.integers(0, 100, shape).astype(stored)

    given = {
        "query": floats(1, width, heads * dim),
        "key": floats(1, width, groups * dim),
        "value": floats(1, width, groups * dim),
        "past_key": cache(),
        "past_value": cache(),
        "seqlens": np.array([rows - 1], np.int32),
        "total": np.array(rows, np.int32),
    }
    names = list(given)
    how: dict[str, Any] = {"num_heads": heads, "kv_num_heads": groups, "scale": dim**-0.5}
    if few:
        for name in ("key_steps", "value_steps"):
            given[name] = np.full(groups * dim, 0.01, np.float32)
        names += [*[""] * 5, "key_steps", "value_steps"]
        how |= {"kv_cache_bit_width": bits, "k_quant_type": "PER_CHANNEL"}
        how["v_quant_type"] = "PER_CHANNEL"
    made = ["out", "present_key", "present_value"]
    node = helper.make_node("GroupQueryAttention", names, made, domain="com.microsoft", **how)
    out = np.zeros_like(given["query"])
    results = dict(zip(made, (out, given["past_key"], given["past_value"]), strict=True))

    def infos(values: dict[str, np.ndarray]) -> list[Any]:
        kind = helper.np_dtype_to_tensor_dtype
        return [helper.make_tensor_value_info(n, kind(v.dtype), v.shape) for n, v in values.items()]

    graph = helper.make_graph([node], "attention", infos(given), infos(results))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = ort.InferenceSession(model.SerializeToString(), options)

    def bound() -> Any:
        values = {n: ort.OrtValue.ortvalue_from_numpy(v.copy()) for n, v in given.items()}
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in made:
            # Rows are written where they lie.
            place = values.get(name.replace("present", "past"))
            binding.bind_ortvalue_output(
                name, place or ort.OrtValue.ortvalue_from_numpy(out.copy())
            )
        return binding

    layers = [bound() for _ in range(args.layers)]
    return lambda: [session.run_with_iobinding(layer) for layer in layers]


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
    parser.add_argument("--runtime", action="store_true", help="ONNX Runtime's kernel, too")
    parser.add_argument("--recipes", nargs="+", default=[], choices=RECIPES)
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
