"""Resident memory of a system from import to decoding, in MiB, each in a process of its own.

    python benchmarks/memory.py MODEL [--recipes baseline,int8]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32]

anonymous: memory of the process alone. mapped: pages of files, which the system may drop and
processes share. peak: the most there was of both until then (Linux). Compiled code that is in
caches already is not compiled again: to see what compiling takes, point TORCHINDUCTOR_CACHE_DIR at
an empty folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

FIELDS = {"peak": "VmHWM", "anonymous": "RssAnon", "mapped": "RssFile"}


def resident() -> dict[str, int]:
    """What the process has in memory now, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines)
    return {name: int(table[field].split()[0]) >> 10 for name, field in FIELDS.items()}


def measure(folder: Path, recipe: str, target: str, length: int, threads: int) -> None:
    """Print a line after every stage."""
    import torch
    from systems import optimized_model, read_prompts

    print(f"{'import':<12} {json.dumps(resident())}", flush=True)
    model = optimized_model(folder, recipe, target, threads)
    print(f"{'optimize':<12} {json.dumps(resident())}", flush=True)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = torch.tensor(read_prompts(None, 1, length, vocab))
    for stage in ("generate", "again"):
        model.forget()
        model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=[], pad_token_id=0)
        print(f"{stage:<12} {json.dumps(resident())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--recipes", default="baseline,int8")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--length", type=int, default=480, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.model, args.recipes, args.targets, args.length, args.threads)
        return
    for target in args.targets.split(","):
        for recipe in args.recipes.split(","):
            print(f"{recipe} {target}", flush=True)
            command = [sys.executable, __file__, str(args.model), "--here"]
            command += ["--recipes", recipe, "--targets", target]
            command += ["--length", str(args.length), "--threads", str(args.threads)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
