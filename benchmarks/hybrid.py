"""A hybrid of gated delta nets and attention, decoding, verifying, reading, against transformers.

    python benchmarks/hybrid.py [--targets torch,onnxruntime] [--rounds 5] [--threads 1]

The model is random, of a qwen3.5's layout with 100M parameters, because only shapes count. Systems
take turns, and a cell is the median over the rounds, in milliseconds: a decoded token, a step of
each width, a prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import graftwork as gw
from graftwork.backends import Target
from graftwork.ir.execution.executable import Executable

TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 96,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 2048,
    "layer_types": TYPES * 3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
NEW, WARM_UP = 32, 3


def build() -> Any:
    """The model, random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def step(executable: Executable, width: int, past: int) -> Callable[[], Any]:
    """A step of `width` tokens of which one is certain, as verification makes it."""
    steps = torch.arange(width)[None]
    inputs = {
        "tokens": torch.randint(1, 100, (1, width)),
        "positions": past + steps,
        "past": torch.tensor([past]),
        "certain": torch.tensor([1]),
        "select": steps.clone(),
    }
    return executable.hold("step", inputs, ("argmax",))


def milliseconds(call: Callable[[], Any], repeats: int = 1) -> float:
    """Of one call, the mean over `repeats`."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return 1e3 * (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--targets", default="torch,onnxruntime")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")
    short, long = torch.randint(1, 8000, (1, 16)), torch.randint(1, 8000, (1, args.prompt))
    systems: dict[str, Any] = {"transformers": model}
    for name in args.targets.split(","):
        systems[name] = gw.optimize(model, target=Target.parse(name, threads=args.threads))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(args.rounds + 1):
        for name, system in systems.items():
            whole, first, prompt = _generations(system, short, long)
            found = {"token": (whole - first) / NEW, f"prompt {args.prompt}": prompt}
            if name != "transformers":
                found |= _widths(system.executable, args.widths)
            for what, value in found.items():
                times[name, what] += [value] * (turn > 0)  # the first round compiles
    for name in systems:
        mine = {what: statistics.median(v) for (of, what), v in times.items() if of == name}
        print(json.dumps({"system": name, "ms": {k: round(v, 2) for k, v in mine.items()}}))


def _generations(system: Any, short: torch.Tensor, long: torch.Tensor) -> tuple[float, ...]:
    """Milliseconds of a text, of its first token, and of that of a long prompt."""
    plain: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    calls = (short, NEW + 1), (short, 1), (long, 1)
    return tuple(
        milliseconds(partial(system.generate, ids, max_new_tokens=count, **plain))
        for ids, count in calls
    )


def _widths(executable: Executable, widths: list[int]) -> dict[str, float]:
    executable.begin(1, 256)
    executable.reserve(256)
    executable.reserve(max(widths), "W")
    found = {}
    for width in widths:
        call = step(executable, width, 128)
        for _ in range(WARM_UP):
            call()
        found[f"width {width}"] = milliseconds(call, 10)
    return found


if __name__ == "__main__":
    main()
