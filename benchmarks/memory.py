"""Resident memory of a system from import to decoding, in MiB, each in a process of its own.

    python benchmarks/memory.py MODEL [--recipes baseline,int8] [--saved]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32]

saved: the model is optimized and saved first, in a process of its own, and what is measured loads
the artifact, which takes neither transformers nor tracing. weights: bytes that the program stores.
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
import tempfile
from pathlib import Path

FIELDS = {"peak": "VmHWM", "anonymous": "RssAnon", "mapped": "RssFile"}


def resident() -> dict[str, int]:
    """What the process has in memory now, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines)
    return {name: int(table[field].split()[0]) >> 10 for name, field in FIELDS.items()}


def measure(folder: Path, recipe: str, target: str, length: int, threads: int) -> None:
    """Print a line after every stage. recipe: none for a folder that is an artifact."""
    import torch
    from systems import optimized_model, read_prompts

    import graftwork as gw

    print(f"{'import':<12} {json.dumps(resident())}", flush=True)
    if recipe:
        model = optimized_model(folder, recipe, target, threads)
    else:
        model = gw.load(folder, target=gw.Target.parse(target, threads=threads))
    print(f"{'optimize' if recipe else 'load':<12} {json.dumps(resident())}", flush=True)
    vocab = model.program.info.vocab_size
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
    parser.add_argument("--saved", action="store_true", help="measure what loads an artifact")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.model, args.recipes, args.targets, args.length, args.threads)
        return
    for target in args.targets.split(","):
        for recipe in args.recipes.split(","):
            print(f"{recipe} {target}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                run(args, recipe, target, Path(folder) / "saved")


def run(args: argparse.Namespace, recipe: str, target: str, folder: Path) -> None:
    """Measure a recipe in a process of its own. folder: where it may be saved."""
    model = args.model
    if args.saved:
        made = [sys.executable, "-m", "graftwork", "optimize", str(model), "--recipe", recipe]
        asked = [*made, "--target", target, "--out", str(folder)]
        subprocess.run(asked, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{'weights':<12} {stored >> 20}", flush=True)
        model, recipe = folder, ""
    command = [sys.executable, __file__, str(model), "--here", "--recipes", recipe]
    command += ["--targets", target, "--length", str(args.length), "--threads", str(args.threads)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
