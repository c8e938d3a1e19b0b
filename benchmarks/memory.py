"""What opening a model takes: memory and seconds from import to the first token and beyond (Linux).

    python benchmarks/memory.py MODEL [MODEL ...] [--recipes baseline,int8] [--saved]
        [--targets onnxruntime:cpu:float32,torch:cpu:float32] [--length 480]

MODEL: a checkpoint folder or a .gguf file. Every recipe runs on every target in a process of its
own, and prints a line for each stage: ``import``, ``optimize`` (or ``load``), ``first`` (a prompt
of 8 tokens and the first token; what this compiles included), ``long`` (a prompt of `--length` and
32 tokens) and ``again`` (the same). Of a stage, in MB: peak is the most resident memory (VmHWM),
anonymous the most that was the process's own, mapped the most pages of files, which the system may
drop and processes share, now what is resident at its end; anonymous and mapped are sampled every 10
ms. s and cpu s are its seconds, and the processor's. ``most`` is the peak of all stages, beside the
bytes of the weights as stored; ``parts`` what the model itself counts.

libraries: the same for a process that imports torch, transformers and onnxruntime, and no model.
saved: the model is also saved (``save``), and the artifact measured in another process, which takes
neither transformers nor tracing. Compiled code and traces that are in caches already are not made
again: for a first time, point GRAFTWORK_CACHE and TORCHINDUCTOR_CACHE_DIR at empty folders.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

FIELDS = {"peak": "VmHWM", "anonymous": "RssAnon", "mapped": "RssFile", "now": "VmRSS"}
MB = 10**6
EVERY = 0.01


def resident() -> dict[str, int]:
    """What the process has in memory now, and the most since the last stage, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    table = dict(line.split(":", 1) for line in lines)
    return {name: int(table[field].split()[0]) << 10 for name, field in FIELDS.items()}


class Stages:
    """Prints a line for every stage of this process."""

    def __init__(self) -> None:
        self.most = 0
        self.sampled = dict.fromkeys(("anonymous", "mapped"), 0)
        print(
            f"{'':<10} {'peak':>7} {'anonymous':>10} {'mapped':>7} {'now':>7} {'s':>7} {'cpu s':>7}"
        )
        self._begin()
        threading.Thread(target=self._sample, daemon=True).start()

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        self.sampled = dict.fromkeys(self.sampled, 0)
        self.start, self.busy = time.perf_counter(), time.process_time()

    def _sample(self) -> None:
        while True:
            now = resident()
            self.sampled = {name: max(most, now[name]) for name, most in self.sampled.items()}
            time.sleep(EVERY)

    def done(self, name: str) -> None:
        """A stage ends here."""
        now = resident()
        self.most = max(self.most, now["peak"])
        sizes = now["peak"], *self.sampled.values(), now["now"]
        peak, anonymous, mapped, left = (size // MB for size in sizes)
        seconds, busy = time.perf_counter() - self.start, time.process_time() - self.busy
        line = f"{name:<10} {peak:>7} {anonymous:>10} {mapped:>7} {left:>7}"
        print(f"{line} {seconds:>7.1f} {busy:>7.1f}", flush=True)
        self._begin()


def libraries() -> None:
    """What the libraries alone take."""
    stages = Stages()
    import onnxruntime  # noqa: F401
    import torch  # noqa: F401
    import transformers

    _ = transformers.AutoModelForCausalLM
    stages.done("import")


def measure(model: Path, recipe: str, target: str, args: argparse.Namespace) -> None:
    """Print a line after every stage. recipe: none for a folder that is an artifact."""
    stages = Stages()
    import torch

    import graftwork as gw

    stages.done("import")
    where = gw.Target.parse(target, threads=args.threads)
    made = gw.optimize(model, recipe, target=where) if recipe else gw.load(model, target=where)
    stages.done("optimize" if recipe else "load")
    if args.out is not None:
        made.save(args.out)
        stages.done("save")
        del made
        return
    vocab = made.program.info.vocab_size
    ids = torch.randint(1, vocab, (1, args.length), generator=torch.Generator().manual_seed(0))

    def run(stage: str, length: int, tokens: int) -> None:
        made.forget()
        options: dict[str, Any] = {"eos_token_id": [], "pad_token_id": 0, "do_sample": False}
        options["return_dict_in_generate"] = True
        stats = made.generate(ids[:, :length], max_new_tokens=tokens, **options).stats
        stages.done(stage)
        rates = length / stats.prefill_seconds, (tokens - 1) / (stats.decode_seconds or 1)
        if stage == "again":
            print(f"tokens/s   {rates[0]:.0f} of the prompt, {rates[1]:.1f} decoding")

    run("first", 8, 1)
    for stage in ("long", "again"):
        run(stage, args.length, 32)
    held = made.report.memory() if made.report is not None else made.executable.memory()
    parts = {"weights": held.weights, "caches": held.caches, "code": held.code}
    print("parts     ", ", ".join(f"{name} {size / MB:.0f}" for name, size in parts.items()))
    print(f"most       {stages.most // MB}", flush=True)


def stored_bytes(model: Path) -> int:
    """Bytes of a model's weights in its files."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", help="checkpoint folders, .gguf files")
    parser.add_argument("--recipes", default="baseline,int8")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--length", type=int, default=480, help="tokens of the long prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--saved", action="store_true", help="save, and measure the artifact too")
    parser.add_argument("--libraries", action="store_true", help="measure imports alone, first")
    parser.add_argument("--here", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here == "libraries":
        return libraries()
    if args.here:
        recipe = "" if args.here == "artifact" else args.recipes
        return measure(args.models[0], recipe, args.targets, args)
    if args.libraries:
        print("libraries", flush=True)
        run(args, "libraries")
    for model in args.models:
        for target in args.targets.split(","):
            for recipe in args.recipes.split(","):
                one(args, model, recipe, target)


def one(args: argparse.Namespace, model: Path, recipe: str, target: str) -> None:
    """Measure a model with a recipe on a target, and its artifact."""
    print(f"{model.name} {recipe} {target}, stored {stored_bytes(model) // MB}", flush=True)
    given = ["--recipes", recipe, "--targets", target]
    run(args, "model", str(model), *given)
    if not args.saved:
        return
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "saved"
        print(f"{model.name} {recipe} {target}, saved", flush=True)
        run(args, "model", str(model), *given, "--out", str(saved))
        print(f"{model.name} {recipe} {target}, artifact, stored {stored_bytes(saved) // MB}")
        sys.stdout.flush()
        run(args, "artifact", str(saved), *given)


def run(args: argparse.Namespace, what: str, *more: str) -> None:
    """Run this script for one measurement in a process of its own."""
    command = [sys.executable, __file__, "--here", what, *more]
    command += ["--length", str(args.length), "--threads", str(args.threads)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
